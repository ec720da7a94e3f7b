"""``latest_start``: each gather as late as still hides it, each gradient reduced as soon as the lane is free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from overlap_pass.schedule.strategies.backward_post import BackwardPost
from overlap_pass.schedule.strategies.backward_pre import BackwardPre
from overlap_pass.schedule.tail import hide_tail
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["LatestStart"]

_MARGINS = (1.0, 1.5, 2.5)
_AHEAD_SHARES = (0.0, 0.02, 0.1)
_FIRST = ((1.0, 0.0), (1.5, 0.1))
_SLACK = 0.5
"""Slack of the most eager policies; with the others it buys nothing and holds memory."""
_KEPT = 3
"""So many policies of the ladder are tried within a budget: those that are best without one."""


@dataclass(frozen=True, slots=True)
class LatestStart:
    """Least memory for the same hidden time.

    Two policies (``schedule.feeding``) are tried, then launching early (``schedule.early``), those of eager FSDP, then a short
    ladder of policies: all without a budget, the best of them within it; until an order is next to the bound. Among the orders whose exact peak
    keeps the budget the winner is chosen by

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
        order, how = self.order(problem)
        names = tuple(problem.program.ops[p].name for p in order)
        return Schedule(spec(self), names, explain(Placement.of(problem), order, how))

    def order(self, problem: Problem) -> tuple[tuple[int, ...], str]:
        """The order alone, by position, and how it came about."""
        order, how = self.before_tail(problem)
        ended = hide_tail(problem, order, Score(problem))
        return ended, how if ended == order else f"{how}, compute put off behind the last launch"

    def before_tail(self, problem: Problem, *, quick: bool = False) -> tuple[tuple[int, ...], str]:
        """The same without compute put off behind the last launch.

        Args:
            quick: without eager FSDP's policies and the ladder.
        """
        score = Score(problem)
        best: tuple[float, int, tuple[int, ...], str] | None = None
        for order, how in self._distinct(problem, score, quick=quick):
            peak_bytes = score.peak_bytes(order)
            if not score.fits(peak_bytes):
                continue
            found = (score.below(order, math.inf if best is None else best[0]), peak_bytes)
            if best is None or found < best[:2]:
                best = (*found, order, how)
            if score.is_close(best[0]):
                break
        if best is None:  # nothing fits, not even the tight order: planning turns this into an error
            return Room.shared(problem).order, "least memory"
        return best[2:]

    def _distinct(self, problem: Problem, score: Score, *, quick: bool) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each candidate once."""
        seen: set[tuple[int, ...]] = set()
        for order, how in self._candidates(problem, score, quick=quick):
            if order not in seen:
                seen.add(order)
                yield order, how

    def _candidates(self, problem: Problem, score: Score, *, quick: bool) -> Iterator[tuple[tuple[int, ...], str]]:
        """The latest launches, a policy that is good nearly always, the earliest, eager FSDP's policies, then the best others.

        All but FSDP's add to the order of least memory: where that does not fit, none of them would.
        """
        ladder, room = problem.once(_Ladder), Room.shared(problem)
        roomy = score.fits(room.smallest_bytes)
        if roomy:
            for margin, share in _FIRST:
                rung = (self.margin or margin, share)
                yield ladder.within(rung, score), _told(rung)
            yield ladder.early(score), "as early as memory allows"
        if quick:
            return
        for policy, order in problem.once(_eager_orders):
            yield order, policy
        if roomy:
            for rung in ladder.best((self.margin,) if self.margin else _MARGINS, score):
                yield ladder.within(rung, score), _told(rung)
            yield room.order, "least memory"


def _eager_orders(problem: Problem) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The orders of eager FSDP's own policies, which no plan should be longer than."""
    index = problem.program.index
    found = (policy.schedule(problem) for policy in (BackwardPost(), BackwardPre()))
    return tuple((made.strategy, tuple([index[name] for name in made.order])) for made in found)


_Rung = tuple[float, float]
"""A margin, and how far ahead of time a gather may go as a share of the step."""
_EARLY: _Rung = (math.inf, math.inf)
"""Launching early (``schedule.early``), which looks at neither."""


def _told(rung: _Rung) -> str:
    return f"margin {rung[0]:g}, up to {rung[1]:.0%} of the step ahead"


class _Ladder:
    """The orders that policies make of one problem, each made once without a budget and once for each that it does not fit."""

    def __init__(self, problem: Problem) -> None:
        self._ground = Ground.shared(problem)
        self._step_us = sum(problem.costs.duration_us.values())
        self._made: dict[tuple[_Rung, int | None], tuple[int, ...]] = {}

    def within(self, rung: _Rung, score: Score) -> tuple[int, ...]:
        """The order for a budget: that without one if it fits."""
        free = self.free(rung)
        if score.fits(score.peak_bytes(free)):
            return free
        key = (rung, score.budget_bytes)
        if key not in self._made:
            self._made[key] = fit(lambda allowed_bytes: self._order(rung, allowed_bytes), score.budget_bytes, score)
        return self._made[key]

    def early(self, score: Score) -> tuple[int, ...]:
        """Launching as early as a budget allows."""
        return self.within(_EARLY, score)

    def free(self, rung: _Rung) -> tuple[int, ...]:
        """The order without a budget."""
        if (rung, None) not in self._made:
            self._made[rung, None] = self._order(rung, None)
        return self._made[rung, None]

    def best(self, margins: Sequence[float], score: Score) -> list[_Rung]:
        """Those with the shortest distinct orders without a budget, shortest first."""
        distinct: dict[tuple[int, ...], _Rung] = {}
        for rung in itertools.product(margins, _AHEAD_SHARES):
            distinct.setdefault(self.free(rung), rung)
        steps_us = {rung: score.step_us(order) for order, rung in distinct.items()}
        return sorted(steps_us, key=lambda rung: steps_us[rung])[:_KEPT]

    def _order(self, rung: _Rung, allowed_bytes: int | None) -> tuple[int, ...]:
        margin, share = rung
        ground = self._ground
        if rung == _EARLY:
            return place(ground.placement, launch_early(ground.placement, ground.room, allowed_bytes))
        slack = _SLACK if margin >= _MARGINS[-1] else 0.0
        wishes = feed(ground, Policy(margin, share * self._step_us, slack), allowed_bytes)
        return place(ground.placement, wishes)
