"""What every pass over one problem starts from, whatever the policy and the budget: made once, read by all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import OpNode, Role
from overlap_pass.schedule.placement import Move, Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.types import Problem

__all__ = ["Boundary", "Ground", "Sizes"]


@dataclass(frozen=True, slots=True)
class Boundary:
    """The place before an anchor at which something may happen: it takes time, communicates, reads, releases, or ends.

    Attributes:
        position: of the anchor.
        following: position of the next boundary's anchor.
        starts_us: when the anchor would start if nothing ever blocked.
        runs_us: time of the anchor on the compute lane.
        following_us: time of the next compute op behind it, where a late launch has to wait for that; else 0.
        most_live: bytes that the tight order holds at most from here to the next boundary.
        reads: launches whose results the anchor is the first to read.
        released: gradient reductions that may start here (those after another come later).
        due: gradient reductions that the tight order launches here.
        communicates: the anchor is a collective (of activations: the others are no anchors).
        quiet: none of the last four, and not the last boundary.
    """

    position: int
    following: int
    starts_us: float
    runs_us: float
    following_us: float
    most_live: int
    reads: tuple[int, ...]
    released: tuple[Move, ...]
    due: tuple[Move, ...]
    communicates: bool
    quiet: bool


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one collective, with the casts that lead to it.

    Attributes:
        gathered: what a gather in flight holds.
        waiting: of a reduction that has not been launched: its gradient.
        made: what launching a reduction adds to that.
    """

    gathered: int
    waiting: int
    made: int

    @classmethod
    def of(cls, move: Move, ops: Sequence[OpNode]) -> Sizes:
        op, head = ops[move.launch], [ops[position] for position in move.head]
        return cls(
            gathered=op.written_bytes + (op.read_bytes if head else 0),
            waiting=(head[0] if head else op).read_bytes,
            made=op.written_bytes + sum(cast.written_bytes for cast in head),
        )


class Ground:
    """One problem without its budget.

    Attributes:
        duration_us: of each op, by position.
        traffic_us: launch → its duration beside compute.
        head_us: launch → what leads to it and goes with it.
        bytes: launch → what it holds.
        gathers: communicator → its parameter gathers by deadline.
        groups: launch → communicator.
        mean_us: communicator → mean duration of its collectives.
        followers: launch → reductions that send its result on.
        boundaries: along the order of compute.
        starts_us: anchor → see :class:`Boundary`.
        due_at: reduction → anchor before which the tight order launches it.
    """

    def __init__(self, placement: Placement, costs: CostTable, room: Room) -> None:
        ops = placement.program.ops
        self.placement, self.costs, self.room = placement, costs, room
        self.duration_us = [costs.duration_us[op.name] for op in ops]
        self._communicates = [op.collective is not None for op in ops]
        self.traffic_us: dict[int, float] = {}
        self.head_us: dict[int, float] = {}
        self.groups: dict[int, str] = {}
        self.bytes = {move.launch: Sizes.of(move, ops) for move in placement.moves}
        self.followers: dict[int, list[Move]] = {}
        for move in placement.moves:
            contention = costs.contention_of(ops[move.launch].name)
            self.traffic_us[move.launch] = self.duration_us[move.launch] * contention.communication_beside_compute
            self.head_us[move.launch] = sum(self.duration_us[p] for p in move.head)
            self.groups[move.launch] = move.group
            for launch in move.after:
                self.followers.setdefault(launch, []).append(move)
        self.mean_us = {group: self._mean_us(group) for group in placement.program.groups}
        self.gathers = {group: self._gathers(group) for group in placement.program.groups}
        self.starts_us = self._nominal_starts()
        self.due_at: dict[int, int] = {}
        self.boundaries = self._boundaries()

    @classmethod
    def shared(cls, problem: Problem) -> Ground:
        """The problem's, made once for all of its budgets."""
        return problem.once(_ground)

    def _mean_us(self, group: str) -> float:
        times_us = [self.duration_us[launch] for launch, lane in self.groups.items() if lane == group]
        return sum(times_us) / len(times_us) if times_us else 0.0

    def _gathers(self, group: str) -> tuple[Move, ...]:
        moves = [m for m in self.placement.moves if m.group == group and m.role is Role.PARAMETER]
        return tuple(sorted(moves, key=lambda m: (m.deadline, m.launch)))

    def _nominal_starts(self) -> dict[int, float]:
        """When each anchor would start if nothing ever blocked, with contention spread evenly over the step."""
        anchors = self.placement.anchors
        runs = [0.0 if self._communicates[p] else self.duration_us[p] for p in anchors]
        compute_us = sum(runs)
        traffic_us = sum(self.duration_us[launch] for launch in self.groups)
        share = min(1.0, traffic_us / compute_us) if compute_us else 0.0
        inflation = 1.0 + (self.costs.contention.compute_beside_communication - 1.0) * share
        inflation *= 1.0 + (sum(self.head_us.values()) / compute_us if compute_us else 0.0)
        clock_us, starts_us = 0.0, {}
        for position, runs_us in zip(anchors, runs, strict=True):
            starts_us[position] = clock_us
            clock_us += runs_us * inflation
        return starts_us

    def _boundaries(self) -> tuple[Boundary, ...]:
        anchors = self.placement.anchors
        if not anchors:
            return ()
        reads, released, due = self._events()
        events = {*reads, *released, *due, anchors[-1]}
        lively = [p for p in anchors if self.duration_us[p] > 0 or p in events or self._communicates[p]]
        found: list[Boundary] = []
        following, following_us = lively[-1] + 1, 0.0
        for position in reversed(lively):
            runs_us = 0.0 if self._communicates[position] else self.duration_us[position]
            first_read, free, wanted = reads.get(position, ()), released.get(position, ()), due.get(position, ())
            communicates = self._communicates[position]
            quiet = bool(found) and not (first_read or free or wanted or communicates)
            most_live = self.room.most_live(position, following)
            found.append(
                Boundary(
                    position,
                    following,
                    self.starts_us[position],
                    runs_us,
                    following_us if self.costs.starts_between_kernels else 0.0,
                    most_live,
                    tuple(first_read),
                    tuple(free),
                    tuple(wanted),
                    communicates,
                    quiet,
                )
            )
            following, following_us = position, runs_us or following_us
        return tuple(reversed(found))

    def _events(self) -> tuple[Mapping[int, Sequence[int]], Mapping[int, Sequence[Move]], Mapping[int, Sequence[Move]]]:
        """Anchor → launches that it is the first to read, reductions that may start before it, reductions due there."""
        anchors = self.placement.anchors
        reads: dict[int, list[int]] = {}
        released: dict[int, list[Move]] = {}
        due: dict[int, list[Move]] = {}
        for move in self.placement.moves:
            if move.role is not Role.GRADIENT:
                reads.setdefault(move.deadline, []).append(move.launch)
            elif not move.after:
                at = anchors[min(bisect_right(anchors, move.release - 1), len(anchors) - 1)]
                released.setdefault(at, []).append(move)
                wanted = self.room.wishes[move.launch][0]
                self.due_at[move.launch] = anchors[min(bisect_left(anchors, wanted), len(anchors) - 1)]
                due.setdefault(self.due_at[move.launch], []).append(move)
        return reads, released, due


def _ground(problem: Problem) -> Ground:
    return Ground(Placement.of(problem), problem.costs, Room.shared(problem))
