"""Feeding the lanes: one pass over the compute order that decides when each collective is launched and waited for.

At every boundary between two compute ops, for every communicator that would run dry before the next boundary:

1. a gather that is due (launched a boundary later it would start behind its latest start) is launched;
2. else the oldest gradient that exists is reduced, if the lane is free again before the next gather is due;
3. else the next gather goes ahead of time, if the policy allows it and its memory fits the budget;
4. else the gradient goes all the same (the lane must not idle).

A collective is never launched while its lane is busy beyond the next boundary: launching later costs nothing and holds
less memory. The latest start of a gather is its first reader's start minus its duration (times a margin), minus what
the lane still has to gather before: earliest deadline first, backwards (Jackson, 1955: EDF is feasible if any order is).

The clock of this pass is an estimate (contention is averaged); ``simulate`` judges the result.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import Role
from overlap_pass.schedule.held import Held
from overlap_pass.schedule.placement import BEFORE, WAITS, Key, Move, Placement
from overlap_pass.schedule.room import Room

__all__ = ["Policy", "feed"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How eager the feeding is.

    Attributes:
        margin: a gather counts this many times its duration when its latest start is computed.
        ahead_us: how long before its latest start a gather may go when the lane would idle (``inf``: any time).
    """

    margin: float = 1.25
    ahead_us: float = 0.0


def feed(
    placement: Placement,
    costs: CostTable,
    policy: Policy,
    *,
    room: Room,
    budget_bytes: int | None,
) -> dict[int, Key]:
    """Wishes (see ``placement.place``) for every launch and every gradient's wait.

    Args:
        room: what the tight order holds, from which all that is held beyond it is counted.
        budget_bytes: bound on the peak, ``None`` for none.
    """
    return _Feeder(placement, costs, policy, Held(placement, room, budget_bytes)).run()


@dataclass(slots=True)
class _Lane:
    """A communicator.

    Attributes:
        gathers: parameter gathers that are still to be launched, by deadline.
        gradients: reductions whose input exists and that are still to be launched, oldest first.
        queued: launched and not started.
        free_us: when what runs on it ends.
    """

    gathers: deque[Move]
    gradients: deque[Move] = field(default_factory=deque)
    queued: deque[tuple[Move, float]] = field(default_factory=deque)
    free_us: float = 0.0


class _Feeder:
    def __init__(self, placement: Placement, costs: CostTable, policy: Policy, held: Held) -> None:
        self.placement, self.costs, self.policy, self.held = placement, costs, policy, held
        self.duration = [costs.duration_us[op.name] for op in placement.program.ops]
        self.starts_us = self._nominal_starts()
        self.lanes = {group: self._lane(group) for group in placement.program.groups}
        self.latest_us = {}
        for lane in self.lanes.values():
            self.latest_us.update(self._latest_starts(lane))
        self.now_us = 0.0
        self.ends_us: dict[int, float] = {}
        self.flying: deque[Move] = deque()  # gradients launched and not waited for
        self.wishes: dict[int, Key] = {}
        self.waited: set[int] = set()
        self.sequence = 0
        self.groups = {move.launch: move.group for move in placement.moves}
        self.following_us = self._following_us()
        self.read_at: dict[int, list[int]] = {}  # anchor → launches whose results it is the first to read
        self.followers: dict[int, list[Move]] = {}  # launch → reductions that send its result on
        for move in placement.moves:
            if move.role is not Role.GRADIENT:
                self.read_at.setdefault(move.deadline, []).append(move.launch)
            for launch in move.after:
                self.followers.setdefault(launch, []).append(move)

    # -- before the pass

    def _lane(self, group: str) -> _Lane:
        moves = [m for m in self.placement.moves if m.group == group and m.role is Role.PARAMETER]
        return _Lane(deque(sorted(moves, key=lambda m: (m.deadline, m.launch))))

    def _nominal_starts(self) -> dict[int, float]:
        """When each anchor would start if nothing ever blocked, with contention spread evenly over the step."""
        compute = sum(self.duration[p] for p in self.placement.anchors if not self._communicates(p))
        traffic = sum(self.duration[m.launch] for m in self.placement.moves)
        share = min(1.0, traffic / compute) if compute else 0.0
        inflation = 1.0 + (self.costs.contention.compute_beside_communication - 1.0) * share
        heads = {m.launch: sum(self.duration[p] for p in m.head) for m in self.placement.moves}
        inflation *= 1.0 + (sum(heads.values()) / compute if compute else 0.0)
        clock, starts = 0.0, {}
        for position in self.placement.anchors:
            starts[position] = clock
            clock += 0.0 if self._communicates(position) else self.duration[position] * inflation
        return starts

    def _following_us(self) -> dict[int, float]:
        """For each anchor, how long the next compute op behind it takes, where a late launch has to wait for it."""
        found, following_us = {}, 0.0
        for position in reversed(self.placement.anchors):
            found[position] = following_us if self.costs.starts_between_kernels else 0.0
            if not self._communicates(position) and self.duration[position] > 0:
                following_us = self.duration[position]
        return found

    def _communicates(self, position: int) -> bool:
        return self.placement.program.ops[position].collective is not None

    def _latest_starts(self, lane: _Lane) -> dict[int, float]:
        latest, free_us = {}, inf
        for move in reversed(lane.gathers):
            free_us = min(free_us, self.starts_us[move.deadline]) - self._traffic_us(move) * self.policy.margin
            latest[move.launch] = free_us
        return latest

    # -- the pass

    def run(self) -> dict[int, Key]:
        released = self._released()
        lively = self._lively(released)
        for position, following in itertools.pairwise((*lively, lively[-1] + 1)):
            self.held.arrive(position)
            for move in released.get(position, ()):
                self.lanes[move.group].gradients.append(move)
            last = position == lively[-1]
            for lane in self.lanes.values():
                self._start_queued(lane)
                self._feed_lane(lane, position, drain=last)
            for launch in self.read_at.get(position, ()):
                self._block_until(launch)
            self._wait_for_gradients(position, following, drain=last)
            self._run_anchor(position)
        return self.wishes

    def _lively(self, released: Mapping[int, list[Move]]) -> tuple[int, ...]:
        """Anchors before which something may happen: those that take time, communicate, read, release, or end."""
        anchors = self.placement.anchors
        events = {*released, *self.read_at, *self.held.due, anchors[-1]}
        return tuple(p for p in anchors if self.duration[p] > 0 or p in events or self._communicates(p))

    def _released(self) -> dict[int, list[Move]]:
        """Anchor → gradient reductions that may start at the boundary before it (those after another come later)."""
        anchors = self.placement.anchors
        found: dict[int, list[Move]] = {}
        for move in self.placement.moves:
            if move.role is Role.GRADIENT and not move.after:
                at = anchors[min(bisect_right(anchors, move.release - 1), len(anchors) - 1)]
                found.setdefault(at, []).append(move)
        return found

    # -- launching

    def _feed_lane(self, lane: _Lane, position: int, *, drain: bool) -> None:
        while lane.gathers and lane.gathers[0].deadline <= position:
            self._launch(lane.gathers.popleft(), lane, position)
        # Compute will block on what it reads here, so nothing keeps that from starting.
        for launch in self.read_at.get(position, ()):
            if self.lanes[self.groups[launch]] is lane:
                self._start_up_to(lane, launch)
        start_us = self._anchor_start_us(position)
        horizon_us = start_us + self._runs_us(position)
        while drain or self._runs_dry(lane, start_us, horizon_us):
            move = self._choose(lane, position, start_us, horizon_us)
            if move is None:
                return
            self._launch(move, lane, position)

    def _runs_dry(self, lane: _Lane, start_us: float, horizon_us: float) -> bool:
        """Whether the lane would have nothing to start at the next boundary.

        Where compute blocks first, the first of the queue starts with the anchor, and only the others wait for the
        boundary.
        """
        blocked = start_us > self.now_us and bool(lane.queued)
        free_us = lane.free_us + (self._traffic_us(lane.queued[0][0]) if blocked else 0.0)
        return len(lane.queued) == blocked and free_us < horizon_us

    def _anchor_start_us(self, position: int) -> float:
        """When the anchor will start, after the gathers that it is the first to read."""
        return max([self.now_us, *(self._foreseen_end_us(launch) for launch in self.read_at.get(position, ()))])

    def _foreseen_end_us(self, launch: int) -> float:
        """When a launched collective will have ended if the compute lane blocks on it from now on."""
        if launch in self.ends_us:
            return self.ends_us[launch]
        lane = self.lanes[self.groups[launch]]
        end_us = max(lane.free_us, self.now_us)
        for move, _ in lane.queued:
            end_us += self._traffic_us(move)
            if move.launch == launch:
                return end_us
        return self.now_us

    def _choose(self, lane: _Lane, position: int, start_us: float, horizon_us: float) -> Move | None:
        gather = lane.gathers[0] if lane.gathers else None
        gradient = lane.gradients[0] if lane.gradients else None
        if gradient is not None and not self.held.reduction_fits(gradient, position):
            gradient = None
        if gather is not None:
            fits = self._fits(gather, position)
            # The nominal clock knows nothing of blocking: what is lost by now moves all later readers.
            latest_us = self.latest_us[gather.launch] + start_us - self.starts_us[position]
            if fits and latest_us < horizon_us + self.following_us[position]:
                return lane.gathers.popleft()
            free_us = max(lane.free_us, horizon_us if self.costs.starts_between_kernels else self.now_us)
            if gradient is not None and (not fits or free_us + self._traffic_us(gradient) <= latest_us):
                return lane.gradients.popleft()
            if fits and latest_us - self.policy.ahead_us <= self.now_us:
                return lane.gathers.popleft()
        return lane.gradients.popleft() if gradient is not None else None

    def _fits(self, gather: Move, position: int) -> bool:
        return position >= gather.release and self.held.gather_fits(gather, position)

    def _traffic_us(self, move: Move) -> float:
        contention = self.costs.contention_of(self.placement.program.ops[move.launch].name)
        return self.duration[move.launch] * contention.communication_beside_compute

    def _launch(self, move: Move, lane: _Lane, position: int, *, rank: int = BEFORE) -> None:
        self.sequence += 1
        self.wishes[move.launch] = (position, rank, self.sequence)
        self.now_us += sum(self.duration[p] for p in move.head)
        lane.queued.append((move, self.now_us))
        if not self.costs.starts_between_kernels:
            self._start_queued(lane, everything=True)
        self.held.launch(move, position)
        if move.role is not Role.PARAMETER:
            self.flying.append(move)

    # -- running

    def _start_queued(self, lane: _Lane, *, everything: bool = False) -> None:
        """At a boundary the next collective starts if the lane is idle; while compute is blocked, one after another."""
        while lane.queued and (everything or lane.free_us <= self.now_us):
            ready_us = lane.queued[0][1]
            self._start_next(lane, ready_us if everything else max(ready_us, self.now_us))

    def _start_up_to(self, lane: _Lane, launch: int) -> None:
        while launch not in self.ends_us and lane.queued:
            self._start_next(lane, lane.queued[0][1])

    def _start_next(self, lane: _Lane, not_before_us: float) -> None:
        move, _ = lane.queued.popleft()
        lane.free_us = max(lane.free_us, not_before_us) + self._traffic_us(move)
        self.ends_us[move.launch] = lane.free_us

    def _block_until(self, launch: int) -> None:
        """The compute lane waits for a collective; what is queued behind that one starts before compute goes on."""
        lane = self.lanes[self.groups[launch]]
        self._start_up_to(lane, launch)
        self.now_us = max(self.now_us, self.ends_us[launch])
        self._start_queued(lane)

    def _wait_for_gradients(self, position: int, following: int, *, drain: bool) -> None:
        """Wait for reductions that are over by now, and earlier where the budget needs their inputs back."""
        while True:
            late = drain or self.held.too_much(position, following)
            if self.flying and (late or self.ends_us.get(self.flying[0].launch, inf) <= self.now_us):
                self._wait_for_gradient(self.flying.popleft(), position)
            elif late and self.held.overdue:
                move = self.held.overdue[0]
                lane = self.lanes[move.group]
                lane.gradients.remove(move)
                self._launch(move, lane, position, rank=WAITS)
            else:
                return

    def _wait_for_gradient(self, move: Move, position: int) -> None:
        self._block_until(move.launch)
        self.held.wait(move)
        self.sequence += 1
        self.wishes.update(dict.fromkeys(move.waits, (position, WAITS, self.sequence)))
        self.waited.add(move.launch)
        for follower in self.followers.get(move.launch, ()):
            if all(launch in self.waited for launch in follower.after):
                self._launch(follower, self.lanes[follower.group], position, rank=WAITS)

    def _runs_us(self, position: int) -> float:
        return 0.0 if self._communicates(position) else self.duration[position]

    def _run_anchor(self, position: int) -> None:
        op = self.placement.program.ops[position]
        if op.collective is not None:
            lane = self.lanes[op.collective.group]
            self._start_queued(lane, everything=True)
            lane.free_us = max(lane.free_us, self.now_us) + self.duration[position]
            self.ends_us[position] = lane.free_us
            return
        busy = any(lane.free_us > self.now_us for lane in self.lanes.values())
        slow = self.costs.contention.compute_beside_communication if busy else 1.0
        self.now_us += self.duration[position] * slow
