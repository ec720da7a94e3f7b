"""``latest_start``: each gather as late as still hides it, each gradient reduced as soon as the lane is free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.schedule.early import launch_early
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.feeding import Policy, feed
from overlap_pass.schedule.fitting import fit
from overlap_pass.schedule.ground import Ground
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.tail import hide_tail
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["LatestStart"]

_MARGINS = (1.0, 1.5, 2.5)
_AHEAD_SHARES = (0.0, 0.02, 0.1)
_KEPT_POLICIES = 4
"""So many of the ladder are tried within a budget: those that are best without one."""


@dataclass(frozen=True, slots=True)
class LatestStart:
    """Least memory for the same hidden time.

    A short ladder of policies (``schedule.feeding``) is tried without a budget, and the best of them within it, and launching
    early (``schedule.early``); among the orders whose exact peak keeps the budget the winner is chosen by

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
        placement = Placement.of(problem)
        program = problem.program
        score = Score(problem)
        best: tuple[float, int, tuple[int, ...], str] | None = None
        for order, how in self._candidates(problem, score):
            peak_bytes = score.peak_bytes(order)
            if not score.fits(peak_bytes):
                continue
            names = tuple(program.ops[p].name for p in order)
            found = (score.below(names, math.inf if best is None else best[0]), peak_bytes)
            if best is None or found < best[:2]:
                best = (*found, order, how)
        if best is None:  # nothing fits, not even the tight order: planning turns this into an error
            return Schedule(spec(self), tuple(program.ops[p].name for p in Room.shared(problem).order))
        ended = hide_tail(problem, best[2], score)
        how = best[3] if ended == best[2] else f"{best[3]}, compute put off behind the last launch"
        return Schedule(spec(self), tuple(program.ops[p].name for p in ended), explain(placement, ended, how))

    def _candidates(self, problem: Problem, score: Score) -> Iterator[tuple[tuple[int, ...], str]]:
        """Orders of the best policies, each distinct one once, then launching early, the tight order last."""
        placement, room, ground = Placement.of(problem), Room.shared(problem), Ground.shared(problem)
        seen: set[tuple[int, ...]] = set()
        ladder = problem.once(_by_several if not self.margin else _by(self.margin))
        for policy in ladder.best:
            how = f"margin {policy.margin:g}, up to {policy.ahead_us / ladder.step_us:.0%} of the step ahead"

            def fed(allowed_bytes: int | None, policy: Policy = policy) -> tuple[int, ...]:
                return place(placement, feed(ground, policy, allowed_bytes))

            free = ladder.orders[policy]
            if not score.fits(score.peak_bytes(free)):
                free = fit(fed, problem.budget_bytes, score)
            if free not in seen:
                seen.add(free)
                yield free, how

        def early(allowed_bytes: int | None) -> tuple[int, ...]:
            return place(placement, launch_early(placement, room, allowed_bytes))

        for order, how in (
            (fit(early, problem.budget_bytes, score), "as early as memory allows"),
            (room.order, "least memory"),
        ):
            if order not in seen:
                seen.add(order)
                yield order, how


class _Ladder:
    """Policies without a budget.

    Attributes:
        step_us: all that the step has to do, which policies are given in shares of.
        orders: policy → its order, distinct ones only.
        best: those with the best scores, best first.
    """

    def __init__(self, problem: Problem, margins: Sequence[float]) -> None:
        ground, score = Ground.shared(problem), Score(problem)
        self.step_us = sum(problem.costs.duration_us.values())
        self.orders: dict[Policy, tuple[int, ...]] = {}
        known: set[tuple[int, ...]] = set()
        for margin, share in itertools.product(margins, _AHEAD_SHARES):
            policy = Policy(margin, share * self.step_us)
            order = place(ground.placement, feed(ground, policy, None))
            if order not in known:
                known.add(order)
                self.orders[policy] = order
        ops = problem.program.ops
        scores = {policy: score.of([ops[p].name for p in order]) for policy, order in self.orders.items()}
        self.best = sorted(scores, key=lambda policy: scores[policy])[:_KEPT_POLICIES]


def _by_several(problem: Problem) -> _Ladder:
    return _Ladder(problem, _MARGINS)


@cache
def _by(margin: float) -> Callable[[Problem], _Ladder]:
    """The same function for the same margin, so that a problem knows what it has made."""
    return lambda problem: _Ladder(problem, (margin,))
