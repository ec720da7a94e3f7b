"""``local_search``: another strategy's order, improved move by move where the simulator says that compute is blocked."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import OpKind, Role
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import BEFORE, Key, Move, Placement, place
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.strategies.backward_post import BackwardPost
from overlap_pass.schedule.strategies.backward_pre import BackwardPre
from overlap_pass.schedule.strategies.greedy import Greedy
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import nearest, spec

__all__ = ["LocalSearch"]

_STARTS: dict[str, Callable[[], Any]] = {
    "as_written": AsWritten,
    "backward_post": BackwardPost,
    "backward_pre": BackwardPre,
    "greedy": Greedy,
    "latest_start": LatestStart,
}
_STRIDES = (1, 3, 9, 27)
_Wishes = dict[int, Key]


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Hill climbing over the places of launches and waits.

    What is tried, the most blocked collective first:

    1. a gather that compute waits for goes some computations ahead, with the gathers before it on its communicator;
    2. reductions before it on its communicator go behind it;
    3. a reduction is waited for some computations later, or launched earlier;
    4. when nothing of that helps any more: one collective, drawn at random (always the same way), by some computations.

    A try counts if it keeps the budget and has a better score, or the same score with a lower peak. The limit is a number
    of tries and not of seconds, so that all ranks agree.

    Options:
        start: the strategy whose order is improved.
        evaluations: how many orders are tried.
    """

    name: ClassVar[str] = "local_search"
    start: str = "latest_start"
    evaluations: int = 100

    def __post_init__(self) -> None:
        if self.start not in _STARTS:
            raise OptionError(
                f"strategy local_search: start={self.start!r} is no start: {nearest(self.start, _STARTS)}"
            )
        if self.evaluations < 0:
            raise OptionError(f"strategy local_search: evaluations={self.evaluations} must be 0 or more")

    def schedule(self, problem: Problem) -> Schedule:
        index = problem.program.index
        first = tuple(index[name] for name in _STARTS[self.start]().schedule(problem).order)
        placement = Placement.of(problem)
        search = _Search(problem, placement, first)
        search.run(self.evaluations)
        names = tuple(problem.program.ops[p].name for p in search.order)
        why = f"{self.start}, improved {search.improvements} times in {search.evaluations} tries"
        return Schedule(spec(self), names, explain(placement, search.order, why))


class _Search:
    """The best order so far, and the tries that are left."""

    def __init__(self, problem: Problem, placement: Placement, first: tuple[int, ...]) -> None:
        self.placement, self.score = placement, Score(problem)
        self.ops = problem.program.ops
        self.steps = tuple(p for p in placement.anchors if problem.costs.duration_us[self.ops[p].name] > 0)
        self.draws = random.Random(0)
        self.order, self.wishes = first, _wishes_of(placement, first)
        self.peak_bytes = self.score.peak_bytes(first)
        self.value = (self.score.of(first), self.peak_bytes)
        self.evaluations = self.improvements = 0

    def run(self, evaluations: int) -> None:
        """Try until the limit, or until nothing is left to try."""
        moves = [move for move in self.placement.moves if move.role is not Role.ACTIVATION]
        if not moves or not self.steps:
            return
        while self.evaluations < evaluations and self._improve_blocked(moves, evaluations):
            pass
        while self.evaluations < evaluations:
            self._try(self._drawn(self.draws.choice(moves)))

    def _improve_blocked(self, moves: list[Move], evaluations: int) -> bool:
        """One improvement at the most blocked collective that has one."""
        blocked_us = self.score.blocked_us(self.order)
        waited = [move for move in moves if blocked_us.get(self.ops[move.launch].name, 0.0) > 0]
        for move in sorted(waited, key=lambda m: (-blocked_us[self.ops[m.launch].name], m.launch)):
            for wishes in self._proposals(move):
                if self.evaluations >= evaluations:
                    return False
                if self._try(wishes):
                    return True
        return False

    def _try(self, wishes: _Wishes) -> bool:
        self.evaluations += 1
        order = place(self.placement, wishes)
        if order == self.order:
            return False
        peak_bytes = self.score.peak_bytes(order)
        if not self.score.fits(peak_bytes) and peak_bytes >= self.peak_bytes:
            return False
        value = (self.score.of(order), peak_bytes)
        if value >= self.value:
            return False
        self.order, self.wishes, self.value, self.peak_bytes = order, wishes, value, peak_bytes
        self.improvements += 1
        return True

    def _proposals(self, move: Move) -> Iterator[_Wishes]:
        if move.role is Role.PARAMETER:
            for stride in _STRIDES:
                yield self._gathered_ahead(move, stride)
            yield self._before_reductions(move)
            return
        for stride in _STRIDES:
            yield {**self.wishes, **self._shifted(move.waits, stride)}
        for stride in _STRIDES:
            yield {**self.wishes, **self._shifted((move.launch,), -stride)}

    def _gathered_ahead(self, move: Move, stride: int) -> _Wishes:
        """The gather goes ahead, and what was launched before it on its communicator goes no later than it."""
        moved = self._shifted((move.launch,), -stride)
        key = moved[move.launch]
        for other in self.placement.moves:
            before = other.group == move.group and other.role is Role.PARAMETER and other.launch != move.launch
            if before and key < self.wishes[other.launch] < self.wishes[move.launch]:
                anchor, rank, sequence = self.wishes[other.launch]
                moved[other.launch] = (key[0], rank, sequence) if anchor > key[0] else self.wishes[other.launch]
        return {**self.wishes, **moved}

    def _before_reductions(self, move: Move) -> _Wishes:
        """The gather changes places with the reduction launched last before it on its communicator."""
        at = self.wishes[move.launch]
        earlier = [
            (self.wishes[other.launch], other.launch)
            for other in self.placement.moves
            if other.role is Role.GRADIENT and other.group == move.group and self.wishes[other.launch] < at
        ]
        if not earlier:
            return self.wishes
        key, launch = max(earlier)
        return {**self.wishes, move.launch: key, launch: at}

    def _drawn(self, move: Move) -> _Wishes:
        stride = self.draws.choice(_STRIDES) * self.draws.choice((-1, 1))
        positions = move.waits if move.role is Role.GRADIENT and self.draws.random() < 0.5 else (move.launch,)
        return {**self.wishes, **self._shifted(positions, stride)}

    def _shifted(self, positions: tuple[int, ...], stride: int) -> _Wishes:
        """Keys of free ops, so many computations later (earlier where negative)."""
        moved = {}
        for position in positions:
            anchor, rank, sequence = self.wishes.get(position, (self.placement.anchors[-1], BEFORE, position))
            step = min(max(bisect_left(self.steps, anchor) + stride, 0), len(self.steps) - 1)
            moved[position] = (self.steps[step], rank, sequence)
        return moved


def _wishes_of(placement: Placement, order: tuple[int, ...]) -> _Wishes:
    """Wishes that say where an order has its launches and the waits of its reductions; the rest follows them."""
    ops = placement.program.ops
    anchors = frozenset(placement.anchors)
    reductions = {wait for move in placement.moves if move.role is Role.GRADIENT for wait in move.waits}
    wishes: _Wishes = {}
    following = placement.anchors[-1] if placement.anchors else 0
    for sequence in range(len(order) - 1, -1, -1):
        position = order[sequence]
        if position in anchors:
            following = position
        elif position in reductions or ops[position].kind is OpKind.LAUNCH:
            wishes[position] = (following, BEFORE, sequence)
    return wishes
