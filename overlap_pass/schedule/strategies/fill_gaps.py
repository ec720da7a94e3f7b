"""``fill_gaps``: compute that nothing waits for moves to where the critical chain is blocked, then ``latest_start``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import Role
from overlap_pass.schedule.compute_order import ComputeOrders, Filled, Filling
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.tail import hide_tail
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["FillGaps"]

_AHEAD_SHARES = (0.0, 0.01, 0.02, 0.05, 0.1)
"""How much of all compute may be skipped; tried from the most on, until compute would end later."""
_HOPELESS = 1.02
"""A way that is so far behind without a budget is not tried within one."""


@dataclass(frozen=True, slots=True)
class FillGaps:
    """For graphs with tensor- or expert-parallel collectives; on others it is ``latest_start``.

    Weight gradients and the like are put off until the chain is blocked (``schedule.compute_order``). Several orders of
    compute are made; the one that ends first by its own clock and that as written are scheduled by ``latest_start`` within the
    budget, and the better score is taken. What is put off keeps its inputs alive: the budget bounds that like all else.

    Options:
        put_off: most compute that may pile up, as a share of all compute.
    """

    name: ClassVar[str] = "fill_gaps"
    put_off: float = 0.015

    def __post_init__(self) -> None:
        if not 0 < self.put_off <= 1:
            raise OptionError(f"strategy fill_gaps: put_off={self.put_off} must be above 0 and at most 1")

    def schedule(self, problem: Problem) -> Schedule:
        best = _Best(problem)
        for way in self._ways(problem, best):
            best.offer(way, quick=True)
            if best.is_close():
                break
        else:
            best.offer(best.way)
        order = hide_tail(problem, best.order, best.score)
        written = problem.program.order
        names = tuple([written[position] for position in order])
        return Schedule(spec(self), names, explain(Placement.of(problem), order, best.way.how))

    def _ways(self, problem: Problem, best: _Best) -> Iterator[_Way]:
        """Compute as written and moved, those first that are best without a budget; what is far worse without one than another
        within it is left out. Where compute as written reaches the bound without one, it comes first and may be enough."""
        written = _Way(problem, None, "compute as written")
        if not any(move.role is Role.ACTIVATION for move in Placement.of(problem).moves):
            yield written
            return
        if best.score.is_close(written.free_us):
            yield written
            yield from (way for way in self._moved(problem) if not best.beats(way.free_us / _HOPELESS))
            return
        for way in sorted((*self._moved(problem), written), key=lambda way: way.free_us):
            if not best.beats(way.free_us / _HOPELESS):
                yield way

    def _moved(self, problem: Problem) -> Iterator[_Way]:
        """Compute moved in the way that ends first, if that moves anything that takes time."""
        orders = problem.once(ComputeOrders)
        put_off_us, budget_bytes = self.put_off * orders.compute_us, problem.budget_bytes

        def filled(share: float) -> Filled:
            return orders.filled(Filling(put_off_us, budget_bytes, share * orders.compute_us))

        *less, best = _AHEAD_SHARES
        if filled(less[0]).timed == filled(best).timed:  # where the most freedom changes nothing, less would not either
            less, best = [], less[0]
        for share in reversed(less):
            if filled(share).end_us > filled(best).end_us:
                break
            best = share
        made = filled(best)
        if made.timed != orders.as_written:
            yield _Way(orders.problem(made, budget_bytes), made.order, f"compute moved, up to {best:.0%} of it ahead")


@dataclass(frozen=True)
class _Way:
    """One order of compute.

    Attributes:
        problem: with that order as the one written.
        places: its positions → those of the program as written; ``None`` for the same.
    """

    problem: Problem
    places: tuple[int, ...] | None
    how: str

    @property
    def free_us(self) -> float:
        """What its first orders score without a budget; within one they are hardly ever better."""
        return self.problem.once(_free_us)


def _free_us(problem: Problem) -> float:
    free = replace(problem, budget_bytes=None)
    order, _ = LatestStart().before_tail(free, quick=True)
    return Score(free).of(order)


class _Best:
    """The best order so far: within the budget, then by score, then by peak."""

    def __init__(self, problem: Problem) -> None:
        self.score = Score(problem)
        self.order, self.way = tuple(range(len(problem.program.ops))), _Way(problem, None, "as written")
        self._value = (True, math.inf, 0)

    def offer(self, way: _Way, *, quick: bool = False) -> None:
        order, _ = LatestStart().before_tail(way.problem, quick=quick)
        if way.places is not None:
            order = tuple([way.places[position] for position in order])
        peak_bytes = self.score.peak_bytes(order)
        fits = self.score.fits(peak_bytes)
        value = (not fits, self.score.of(order), peak_bytes)
        if value < self._value:
            self._value, self.order, self.way = value, order, way

    def is_close(self) -> bool:
        """Whether looking further would buy next to nothing."""
        return not self._value[0] and self.score.is_close(self._value[1])

    def beats(self, score_us: float) -> bool:
        """Whether it is within the budget and no worse than that."""
        return not self._value[0] and self._value[1] <= score_us
