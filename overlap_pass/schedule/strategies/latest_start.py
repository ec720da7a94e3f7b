"""``latest_start``: each gather as late as still hides it, each gradient reduced as soon as the lane is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.feeding import Policy, feed, tight
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["LatestStart"]

_MARGINS = (1.0, 1.5, 2.5)
_AHEAD_SHARES = (0.0, 0.02, 0.1, 1.0)
_SHRINKS = 3


@dataclass(frozen=True, slots=True)
class LatestStart:
    """Least memory for the same hidden time.

    A short ladder of policies (``schedule.feeding``) is tried; among the orders whose exact peak keeps the budget the
    winner is chosen by

    1. score (``schedule.score``: the simulated step, also with slower communication);
    2. peak;
    3. place on the ladder.

    Options:
        margin: how many times its duration a gather is given before its first reader; 0 tries several.
    """

    name: ClassVar[str] = "latest_start"
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise OptionError(f"strategy latest_start: margin={self.margin} must be 0 (try several) or more")

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement(problem.dag)
        room = Room.of(placement)
        program = problem.program
        score = Score(problem)
        best: tuple[float, int, tuple[int, ...], str] | None = None
        for order, how in self._candidates(problem, placement, room):
            names = tuple(program.ops[p].name for p in order)
            peak_bytes = peak(program, names).peak_bytes
            if problem.budget_bytes is not None and peak_bytes > problem.budget_bytes:
                continue
            found = (score.of(names), peak_bytes)
            if best is None or found < best[:2]:
                best = (*found, order, how)
        if best is None:  # nothing fits, not even the tight order: planning turns this into an error
            order = place(placement, tight(placement))
            return Schedule(spec(self), tuple(program.ops[p].name for p in order))
        names = tuple(program.ops[p].name for p in best[2])
        return Schedule(spec(self), names, explain(placement, best[2], best[3]))

    def _candidates(self, problem: Problem, placement: Placement, room: Room) -> Iterator[tuple[tuple[int, ...], str]]:
        """Orders of the ladder, each distinct one once, the tight order last."""
        seen: set[tuple[int, ...]] = set()
        step_us = sum(problem.costs.duration_us.values())
        for margin in (self.margin,) if self.margin else _MARGINS:
            for share in _AHEAD_SHARES:
                policy = Policy(margin, share * step_us)
                order = self._within_budget(problem, placement, room, policy)
                if order not in seen:
                    seen.add(order)
                    yield order, f"margin {margin:g}, up to {share:.0%} of the step ahead"
        order = place(placement, tight(placement))
        if order not in seen:
            yield order, "least memory"

    def _within_budget(self, problem: Problem, placement: Placement, room: Room, policy: Policy) -> tuple[int, ...]:
        """Feed; where the exact peak is over the budget, feed again with what was too much taken off."""
        program, allowed = problem.program, problem.budget_bytes
        for _ in range(_SHRINKS):
            wishes = feed(placement, problem.costs, policy, room_bytes=partial(room.left_bytes, allowed))
            order = place(placement, wishes)
            if problem.budget_bytes is None or allowed is None:
                break
            over = peak(program, tuple(program.ops[p].name for p in order)).peak_bytes - problem.budget_bytes
            if over <= 0:
                break
            allowed -= over
        return order
