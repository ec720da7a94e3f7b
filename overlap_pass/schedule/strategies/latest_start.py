"""``latest_start``: each gather as late as still hides it, each gradient reduced as soon as the lane is free."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
_FAR = 1.02
"""A policy that is so far behind another without a budget is not tried within one."""
_KEPT = 3
"""So many policies of the ladder are tried within a budget at most: those that are best without one."""
_ALIKE = 1.0002
"""Of policies whose orders without a budget are so near to each other, by step and by score, one is tried within."""


@dataclass(frozen=True, slots=True)
class LatestStart:
    """Least memory for the same hidden time.

    Two policies (``schedule.feeding``) are tried, then launching early (``schedule.early``), those of eager FSDP, then a short
    ladder of policies: all without a budget, and within it those that are near the best there; until an order is next to the
    bound. Among the orders whose exact peak keeps the budget the winner is chosen by

    1. score (``schedule.score``: the simulated step, also with slower communication);
    2. peak;
    3. what was tried first.

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
        written = problem.program.order
        names = tuple([written[position] for position in order])
        return Schedule(spec(self), names, explain(Placement.of(problem), order, how))

    def order(self, problem: Problem) -> tuple[tuple[int, ...], str]:
        """The order alone, by position, and how it came about."""
        order, how = self.before_tail(problem)
        ended = hide_tail(problem, order, Score(problem))
        return ended, how if ended == order else f"{how}, compute put off behind the last launch"

    def promise_us(self, problem: Problem) -> float:
        """What the best of its first orders scores without a budget."""
        ladder = problem.once(_Ladder)
        return min(ladder.free_us(rung) for rung in self._first())

    def _first(self) -> list[_Rung]:
        return [*((self.margin or margin, share) for margin, share in _FIRST), _EARLY]

    def before_tail(self, problem: Problem, *, quick: bool = False) -> tuple[tuple[int, ...], str]:
        """The same without compute put off behind the last launch.

        Args:
            quick: without eager FSDP's policies and the ladder.
        """
        search = _Search(problem)
        search.follow(self._first())
        if not quick and not search.done:
            for policy, order in problem.once(_eager_orders):
                search.offer(order, policy)
            search.follow(search.ladder.best((self.margin,) if self.margin else _MARGINS))
            search.offer(search.room.order, "least memory")
        return search.order, search.how


class _Search:
    """The best order for one problem and its budget so far; what cannot win is not looked at.

    Attributes:
        order, how: that order and how it came about; that of least memory until one fits.
        best_us: its score, infinite until then.
    """

    def __init__(self, problem: Problem) -> None:
        self.room, self.ladder = Room.shared(problem), problem.once(_Ladder)
        self.order, self.how, self.best_us = self.room.order, "least memory", math.inf
        self._score, self._peak_bytes = Score(problem), 0
        self._seen: set[tuple[int, ...]] = set()

    @property
    def done(self) -> bool:
        """Whether looking further would buy next to nothing."""
        return self.best_us < math.inf and self._score.is_close(self.best_us)

    def offer(self, order: tuple[int, ...], how: str) -> None:
        """Take an order if it fits and is better."""
        if self.done or order in self._seen:
            return
        self._seen.add(order)
        peak_bytes = self._score.peak_bytes(order)
        if self._score.fits(peak_bytes):
            found = (self._score.below(order, self.best_us), peak_bytes)
            if found < (self.best_us, self._peak_bytes):
                (self.best_us, self._peak_bytes), self.order, self.how = found, order, how

    def follow(self, rungs: Sequence[_Rung]) -> None:
        """Offer what policies make.

        First the orders without a budget that keep it, as they come; then those that have to be made for it. All of these add to
        the order of least memory: where that does not fit, none is made.
        """
        tight = []
        for rung in rungs:
            if self.done:
                return
            free = self.ladder.free(rung)
            if self._score.fits(self._score.peak_bytes(free)):
                self.offer(free, _told(rung))
            else:
                tight.append(rung)
        if self.done or not self._score.fits(self.room.smallest_bytes):
            return
        least_us = min((self.ladder.free_us(rung) for rung in rungs if rung != _EARLY), default=math.inf)
        for rung in sorted(tight, key=lambda rung: (rung == _EARLY, self.ladder.free_us(rung))):
            if rung == _EARLY or self.ladder.free_us(rung) <= least_us * _FAR:
                self.offer(self.ladder.within(rung, self._score, self.best_us), _told(rung))


def _eager_orders(problem: Problem) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The orders of eager FSDP's own policies, which no plan should be longer than."""
    placement = Placement.of(problem)
    return tuple((spec(policy), policy.order(placement)) for policy in (BackwardPost(), BackwardPre()))


_Rung = tuple[float, float]
"""A margin, and how far ahead of time a gather may go as a share of the step."""
_EARLY: _Rung = (math.inf, math.inf)
"""Launching early (``schedule.early``), which looks at neither."""


def _told(rung: _Rung) -> str:
    if rung == _EARLY:
        return "as early as memory allows"
    return f"margin {rung[0]:g}, up to {rung[1]:.0%} of the step ahead"


class _Ladder:
    """The orders that policies make of one problem, each made once without a budget and once for each that it does not fit."""

    def __init__(self, problem: Problem) -> None:
        self._ground, self._free_score = Ground.shared(problem), Score(replace(problem, budget_bytes=None))
        self._step_us = sum(problem.costs.duration_us.values())
        self._made: dict[tuple[_Rung, int | None], tuple[tuple[int, ...], float]] = {}
        self._free_us: dict[_Rung, float] = {}
        self._best: dict[tuple[float, ...], list[_Rung]] = {}

    def free(self, rung: _Rung) -> tuple[int, ...]:
        """The order without a budget."""
        return self.within(rung, self._free_score)

    def free_us(self, rung: _Rung) -> float:
        """What that scores."""
        if rung not in self._free_us:
            self._free_us[rung] = self._free_score.of(self.free(rung))
        return self._free_us[rung]

    def within(self, rung: _Rung, score: Score, best_us: float = math.inf) -> tuple[int, ...]:
        """The order for a budget; one that holds too much where already that scores no better than ``best_us``."""
        key = (rung, score.budget_bytes)
        known = self._made.get(key)
        if known is None or (known[1] < best_us and not score.fits(score.peak_bytes(known[0]))):
            known = (fit(lambda allowed_bytes: self._order(rung, allowed_bytes), score, best_us), best_us)
            self._made[key] = known
        return known[0]

    def best(self, margins: tuple[float, ...]) -> list[_Rung]:
        """Those with the shortest orders without a budget, shortest first, without any that is next to a shorter one."""
        if margins not in self._best:
            kept: list[_Rung] = []
            for rung in self._ranked(margins)[:_KEPT]:
                if not any(self._alike(rung, shorter) for shorter in kept):
                    kept.append(rung)
            self._best[margins] = kept
        return self._best[margins]

    def _alike(self, one: _Rung, other: _Rung) -> bool:
        """Whether their orders without a budget are next to each other."""
        steps_us = sorted(self._free_score.step_us(self.free(rung)) for rung in (one, other))
        scores_us = sorted(self.free_us(rung) for rung in (one, other))
        return all(more_us <= less_us * _ALIKE for less_us, more_us in (steps_us, scores_us))

    def _ranked(self, margins: tuple[float, ...]) -> list[_Rung]:
        """All margins with the largest share, and the best of them with all shares."""
        eager = [(margin, _AHEAD_SHARES[-1]) for margin in margins]
        best = min(eager, key=lambda rung: self._free_score.step_us(self.free(rung)))
        distinct: dict[tuple[int, ...], _Rung] = {}
        for rung in sorted({*eager, *itertools.product(best[:1], _AHEAD_SHARES)}):
            distinct.setdefault(self.free(rung), rung)
        steps_us = {rung: self._free_score.step_us(order) for order, rung in distinct.items()}
        return sorted(steps_us, key=lambda rung: steps_us[rung])

    def _order(self, rung: _Rung, allowed_bytes: int | None) -> tuple[int, ...]:
        margin, share = rung
        ground = self._ground
        if rung == _EARLY:
            return place(ground.placement, launch_early(ground.placement, ground.room, allowed_bytes))
        slack = _SLACK if margin >= _MARGINS[-1] else 0.0
        wishes = feed(ground, Policy(margin, share * self._step_us, slack), allowed_bytes)
        return place(ground.placement, wishes)
