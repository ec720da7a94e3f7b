"""What must have happened before and after each op in every order: counts over the fixed ops, and longest chains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from functools import cached_property

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.program import OpKind

__all__ = ["Precedence"]


class Precedence:
    """One program and its prices in arrays by position, for :func:`overlap_pass.simulate.bound.lower_bound`.

    The fixed ops keep their order as written and are numbered along it from 0 (their *rank*).

    Attributes:
        predecessors, successors: direct ones, by position.
        duration_us, launch_us, is_compute: of each op; only compute ops and launches have a duration.
        compute_us: sum over the compute ops.
        fixed: positions of the fixed ops; ``rank`` is the inverse.
        waits: launch → its waits.
        after: for each op the rank of the last fixed op that precedes it in every order, -1 for none.
        before: for each op the rank of the first fixed op that it precedes in every order, ``len(fixed)`` for none.
    """

    def __init__(self, dag: DepGraph, costs: CostTable, fixed: Collection[str]) -> None:
        program, names = dag.program, set(fixed)
        self.predecessors, self.successors = dag.predecessors, dag.successors
        self.is_compute = [op.kind is OpKind.COMPUTE for op in program.ops]
        self._program = program
        self._set_prices(costs)
        self.fixed = [position for position, op in enumerate(program.ops) if op.name in names]
        self.rank = {position: rank for rank, position in enumerate(self.fixed)}
        index = program.index
        self.waits = {index[launch]: tuple(index[w] for w in waits) for launch, waits in program.waits_of.items()}
        self._launch_of = {wait: launch for launch, waits in self.waits.items() for wait in waits}
        self.after = self._after()
        self.before = self._before()

    def _set_prices(self, costs: CostTable) -> None:
        timed, ops = (OpKind.COMPUTE, OpKind.LAUNCH), self._program.ops
        self.duration_us = [costs.duration_us.get(op.name, 0.0) if op.kind in timed else 0.0 for op in ops]
        self.cpu_ahead_us = costs.cpu_ahead_us
        self.launch_us = [costs.launch_us.get(op.name, 0.0) for op in ops]
        self.compute_us = sum(us for us, counts in zip(self.duration_us, self.is_compute, strict=True) if counts)

    def at(self, costs: CostTable) -> Precedence:
        """The same facts at other prices."""
        twin = copy(self)
        twin.__dict__.pop("heads_us", None)  # a sum of prices
        twin._set_prices(costs)
        return twin

    def _after(self) -> list[int]:
        if not self.fixed:
            return [-1] * len(self.predecessors)
        found: list[int] = []
        own = self._rank_or(-1)
        for position, predecessors in enumerate(self.predecessors):
            last = -1
            for predecessor in predecessors:
                rank = own[predecessor] if own[predecessor] >= 0 else found[predecessor]
                last = rank if rank > last else last
            found.append(own[position] - 1 if own[position] >= 0 else last)
        return found

    def _before(self) -> list[int]:
        count = len(self.fixed)
        if not count:
            return [0] * len(self.predecessors)
        found, own = [count] * len(self.predecessors), self._rank_or(count)
        for position in range(len(found) - 1, -1, -1):
            first = count
            for successor in self.successors[position]:
                rank = own[successor] if own[successor] < count else found[successor]
                first = rank if rank < first else first
            found[position] = own[position] + 1 if own[position] < count else first
        return found

    def _rank_or(self, none: int) -> list[int]:
        """By position, the op's rank; ``none`` where it is not fixed."""
        found = [none] * len(self.predecessors)
        for rank, position in enumerate(self.fixed):
            found[position] = rank
        return found

    def ended_before(self, launch: int) -> int:
        """Rank of the first fixed op that starts only after this collective has ended.

        That takes a wait in between: what merely comes later in the order need not await it.
        """
        return min((self.before[wait] for wait in self.waits[launch]), default=len(self.fixed))

    @cached_property
    def heads_us(self) -> dict[int, float]:
        """Launch → compute that leads to it and to nothing else, and that no fixed op comes after."""
        leads: list[int | None] = [None] * len(self.predecessors)
        found: dict[int, float] = {}
        for position in range(len(leads) - 1, -1, -1):
            if position in self.waits or position in self.rank:
                continue
            targets = {s if s in self.waits else leads[s] for s in self.successors[position]}
            if len(targets) == 1:
                leads[position] = launch = targets.pop()
                if launch is not None and self.is_compute[position] and self.before[position] == len(self.fixed):
                    found[launch] = found.get(launch, 0.0) + self.duration_us[position]
        return found

    def chains(self, floor_us: Sequence[float] = (), rest_us: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """For each op the least time from the step's start to its own, and from there to the step's end.

        Args:
            floor_us, rest_us: by rank, the same for fixed ops from another argument; with them the fixed ops also
                form a chain.
        """
        return self._heads(floor_us), self._tails(rest_us)

    def _heads(self, floor_us: Sequence[float]) -> list[float]:
        ready: list[float] = []
        done: list[float] = []  # when what stands behind the op may start
        duration_us, rank, launch_of = self.duration_us, self.rank, self._launch_of
        previous_us = 0.0
        for position, predecessors in enumerate(self.predecessors):
            start_us = 0.0
            for predecessor in predecessors:
                if done[predecessor] > start_us:
                    start_us = done[predecessor]
            if floor_us and position in rank:
                start_us = max(start_us, floor_us[rank[position]], previous_us)
                previous_us = start_us + duration_us[position]
            ready.append(start_us)
            if self.is_compute[position]:
                start_us += duration_us[position]
            elif position in launch_of:
                launch = launch_of[position]
                start_us = max(start_us, ready[launch] + duration_us[launch])
            done.append(start_us)
        return ready

    def _tails(self, rest_us: Sequence[float]) -> list[float]:
        left = [0.0] * len(self.predecessors)
        duration_us, rank, waits = self.duration_us, self.rank, self.waits
        next_us = 0.0
        for position in range(len(left) - 1, -1, -1):
            behind_us = _most(left, self.successors[position])
            if position in waits:
                behind_us = max(behind_us, duration_us[position] + _most(left, waits[position]))
            else:
                behind_us += duration_us[position]
            if rest_us and position in rank:
                behind_us = max(behind_us, rest_us[rank[position]], duration_us[position] + next_us)
                next_us = behind_us
            left[position] = behind_us
        return left

    def behind_us(self, position: int, left: Sequence[float]) -> float:
        """Least time from the end of an op to the end of the step: for a collective, behind its waits."""
        return _most(left, self.waits.get(position, self.successors[position]))


def _most(left: Sequence[float], followers: Sequence[int]) -> float:
    most_us = 0.0
    for follower in followers:
        if left[follower] > most_us:
            most_us = left[follower]
    return most_us
