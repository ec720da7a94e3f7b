"""Which order a plan takes: one strategy at several budgets and several sizes of launches, and the safe orders.

More budget must never give a longer step, and no strategy can promise that by itself: with more room it may take
another path to a worse order. So a strategy is asked at a ladder of budgets that does not depend on the one given, and

1. each order found *needs* the larger of the rung it was made for and its own peak; it is at hand if that is within the
   budget given, and so with every larger one;
2. orders at hand are gone through by what they need, least first, and each takes the place of the one before if its
   score is better and its step no longer (the order as written: if its step is shorter).

What a larger budget adds comes last in 2, so it can only shorten the step.

    budget given                       ▼
    rungs            ├──┬──┬─────┬───────────┬───────────────────────┤
                 smallest   made for these   not asked               what the strategy takes without a bound

Rungs are asked from the least on, until an order is within 0.1 % of the bound or of that without a budget, or until
``_PATIENCE`` rungs in a row gained less than that: more memory would buy next to nothing. A variant that falls behind
another by ``_HOPELESS``, or by ``_BEHIND`` at both ends of the ladder, is given up. Where that stops depends on those ends
and the rungs below alone. Of the variants of the program (``schedule.variants``) those with the best quick orders are
asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import CLOSE, Score
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Schedule, Strategy
from overlap_pass.schedule.variants import Variant
from overlap_pass.schedule.verify import violations
from overlap_pass.units import format_bytes, format_us

__all__ = ["Choice", "choose"]

_log = logging.getLogger("overlap_pass")

_RUNGS = (0.00390625, 0.03125, 0.0625, 0.125, 0.25, 0.5)
_ASKED_VARIANTS = 2
_WORTH = 1e-5
"""A rung less than this share of the smallest memory above it is passed over."""
_PATIENCE = 2
_HOPELESS = 0.02
_BEHIND = 0.01


@dataclass(frozen=True)
class Choice:
    """The order to run.

    Attributes:
        notes: why it is not the strategy's, or what the strategy did wrong.
    """

    variant: Variant
    schedule: Schedule
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Option:
    variant: Variant
    schedule: Schedule
    peak_bytes: int
    needed_bytes: int
    score_us: float
    step_us: float
    safe: bool = False


def choose(found: Sequence[Variant], strategy: Strategy, budget_bytes: int | None) -> Choice:
    """The best order within the budget.

    Args:
        found: what to choose from. The first is the program as it came, whose order as written or order of least memory
            must fit.
        budget_bytes: bound on the peak, ``None`` for none.
    """
    bench = _Bench(strategy)
    safe = bench.safe_options(found[0])
    if isinstance(strategy, AsWritten):  # asked to move nothing: only the budget is a reason to
        kept = next(option for option in safe if budget_bytes is None or option.peak_bytes <= budget_bytes)
        return Choice(kept.variant, kept.schedule)
    own = bench.climb(bench.promising(found), min(option.peak_bytes for option in safe), budget_bytes)
    at_hand = [o for o in (*safe, *own) if budget_bytes is None or o.needed_bytes <= budget_bytes]
    best = _best(at_hand)
    why = () if not best.safe else _why_safe(strategy, best, own, budget_bytes)
    return Choice(best.variant, best.schedule, (*bench.complaints, *why))


def _best(options: Sequence[_Option]) -> _Option:
    """Rule 2; the sort is stable, so that ties go to the fewest changes."""
    ordered = sorted(options, key=lambda option: option.needed_bytes)
    best = ordered[0]
    for option in ordered[1:]:
        better = option.score_us < best.score_us or (best.safe and option.score_us == best.score_us)
        if option.step_us <= best.step_us if better else option.safe and option.step_us < best.step_us:
            best = option
    return best


@dataclass(slots=True)
class _Climb:
    """One variant on the ladder; ``done`` once more memory buys next to nothing.

    Attributes:
        free_us: score of the order that is made without a budget; infinite until there is one.
    """

    variant: Variant
    score: Score
    free_us: float = math.inf
    best_us: float = math.inf
    idle: int = 0

    def note(self, option: _Option | None) -> None:
        """The order for the next rung."""
        if option is not None:
            self.idle = 0 if option.score_us < self.best_us * (1 - CLOSE) else self.idle + 1
            self.best_us = min(self.best_us, option.score_us)

    def ahead_of(self, other: _Climb) -> bool:
        """Whether it is clearly better both with the least memory and without a bound."""
        far = 1 + _BEHIND
        return self.best_us * far <= other.best_us and self.free_us * far <= other.free_us

    @property
    def done(self) -> bool:
        near_free = self.free_us < math.inf and self.best_us <= self.free_us * (1 + CLOSE)
        return near_free or self.score.is_close(self.best_us) or self.idle == _PATIENCE


class _Bench:
    """Asks the strategy and judges what it says, each order once."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._scores: dict[int, Score] = {}
        self._known: dict[tuple[int, tuple[str, ...]], _Option | None] = {}
        self.complaints: tuple[str, ...] = ()

    def option(self, variant: Variant, rung_bytes: int | None) -> _Option | None:
        """The strategy's order for a budget; ``None`` for an illegal one, with a complaint."""
        schedule = self._strategy.schedule(replace(variant.problem, budget_bytes=rung_bytes))
        key = (id(variant), schedule.order)
        if key not in self._known:
            self._known[key] = self._judged(variant, schedule)
        known = self._known[key]
        if known is None:
            return None
        needed_bytes = max(known.peak_bytes, rung_bytes or 0)
        return replace(known, schedule=schedule, needed_bytes=needed_bytes)

    def climb(self, variants: Sequence[Variant], smallest_bytes: int, budget_bytes: int | None) -> list[_Option]:
        """The strategy's orders for budgets from the least on, while more of it helps, and without one."""
        climbs = [_Climb(variant, self._score(variant)) for variant in variants]
        found = self._step(climbs, smallest_bytes) if budget_bytes is None or smallest_bytes <= budget_bytes else []
        climbs = [climb for climb in climbs if not climb.done]
        free = [option for option in map(self._free_option, climbs) if option is not None]
        climbs = [climb for climb in climbs if not any(other.ahead_of(climb) for other in climbs)]
        range_bytes = max((option.peak_bytes - smallest_bytes for option in free), default=0)
        for share in _RUNGS if range_bytes > 0 else ():
            rung_bytes = smallest_bytes + int(share * range_bytes)
            if rung_bytes < smallest_bytes * (1 + _WORTH):
                continue
            if budget_bytes is not None and rung_bytes > budget_bytes:
                break
            climbs = [climb for climb in climbs if not climb.done]
            found += self._step(climbs, rung_bytes)
            best_us = min((climb.best_us for climb in climbs), default=math.inf)
            climbs = [climb for climb in climbs if climb.best_us <= best_us * (1 + _HOPELESS)]
        return [*found, *free]

    def _free_option(self, climb: _Climb) -> _Option | None:
        option = self.option(climb.variant, None)
        climb.free_us = math.inf if option is None else option.score_us
        return option

    def _step(self, climbs: Sequence[_Climb], rung_bytes: int) -> list[_Option]:
        """One budget for all that still climb."""
        found = []
        for climb in climbs:
            option = self.option(climb.variant, rung_bytes)
            climb.note(option)
            found += [] if option is None else [option]
        return found

    def promising(self, found: Sequence[Variant]) -> list[Variant]:
        """Those with the best quick orders without a bound; without a look at what a lane alone keeps from being among them."""
        if len(found) <= _ASKED_VARIANTS:
            return list(found)
        scores: list[tuple[float, int]] = []
        floors_us = [self._score(variant).floor_us for variant in found]
        for place in sorted(range(len(found)), key=floors_us.__getitem__):
            if len(scores) < _ASKED_VARIANTS or floors_us[place] <= scores[-1][0]:
                scores = sorted([*scores, (LatestStart().promise_us(found[place].problem), place)])[:_ASKED_VARIANTS]
        return [found[place] for _, place in scores]

    def _score(self, variant: Variant) -> Score:
        return self._scores.setdefault(id(variant), Score(variant.problem))

    def _judged(self, variant: Variant, schedule: Schedule) -> _Option | None:
        broken = violations(variant.problem.program, schedule.order)
        if not broken:
            return self._rated(variant, schedule)
        complaint = f"{schedule.strategy} made an illegal order and was dropped: {broken[0]}"
        if complaint not in self.complaints:
            _log.error("%s: %s", variant.problem.program.name, complaint)
            self.complaints += (complaint,)
        return None

    def _rated(self, variant: Variant, schedule: Schedule, *, safe: bool = False) -> _Option:
        score = self._score(variant)
        index = variant.problem.program.index
        order = tuple([index[name] for name in schedule.order])
        peak_bytes, step_us, score_us = score.peak_bytes(order), score.step_us(order), score.of(order)
        return _Option(variant, schedule, peak_bytes, peak_bytes, score_us, step_us, safe)

    def safe_options(self, variant: Variant) -> list[_Option]:
        """The order as written, and that of least memory where it holds less."""
        problem = variant.problem
        written = self._rated(variant, AsWritten().schedule(problem), safe=True)
        placement = Placement.of(problem)
        room = Room.shared(problem)
        if room.smallest_bytes >= written.peak_bytes:
            return [written]
        names = tuple(problem.program.ops[position].name for position in room.order)
        why = explain(placement, room.order, "least memory, to keep the budget")
        return [written, self._rated(variant, Schedule("least_memory", names, why), safe=True)]


def _why_safe(strategy: Strategy, best: _Option, own: Sequence[_Option], budget_bytes: int | None) -> tuple[str, ...]:
    """Why none of the strategy's orders was taken."""
    if isinstance(strategy, AsWritten) or not own:
        return ()
    least = min(own, key=lambda option: option.needed_bytes)
    if budget_bytes is not None and least.needed_bytes > budget_bytes:
        return (
            f"{least.schedule.strategy} would reach {format_bytes(least.needed_bytes)}, over the budget of "
            f"{format_bytes(budget_bytes)}, and was dropped",
        )
    if best.schedule.strategy != AsWritten.name:
        return (f"{least.schedule.strategy} found nothing better than the order of least memory, which is taken",)
    return (
        f"{least.schedule.strategy} is predicted at {format_us(least.step_us)}, the order as written at "
        f"{format_us(best.step_us)}; the order as written is kept",
    )
