"""``fill_gaps``: compute that nothing waits for moves to where the critical chain is blocked, then ``latest_start``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import Role
from overlap_pass.schedule.compute_order import ComputeOrders, Filling
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["FillGaps"]

_AHEAD_SHARES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
_SCHEDULED = 2
_HOPELESS = 1.02
"""Where the proven bound of compute as written is so far above that of any order, compute is moved first."""


@dataclass(frozen=True, slots=True)
class FillGaps:
    """For graphs with tensor- or expert-parallel collectives; on others it is ``latest_start``.

    Weight gradients and the like are put off until the chain is blocked (``schedule.compute_order``). Several orders of
    compute are made, the most promising are scheduled by ``latest_start`` within the budget, and the best score is taken, the
    order of compute as written among them. What is put off keeps its inputs alive: the budget bounds that like all else.

    Options:
        put_off: most compute that may pile up, as a share of all compute.
    """

    name: ClassVar[str] = "fill_gaps"
    put_off: float = 0.015

    def __post_init__(self) -> None:
        if not 0 < self.put_off <= 1:
            raise OptionError(f"strategy fill_gaps: put_off={self.put_off} must be above 0 and at most 1")

    def schedule(self, problem: Problem) -> Schedule:
        placement, best = Placement.of(problem), _Best(problem)
        moves = any(move.role is Role.ACTIVATION for move in placement.moves)
        hopeless = moves and best.score.written_bound_us > best.score.bound_us * _HOPELESS
        if not hopeless:
            best.offer(_as_written(problem), "compute as written")
        if moves and not best.is_close():
            for order, how in self._moved(problem):
                best.offer(order, how)
                if best.is_close():
                    break
        if hopeless and not best.beats(best.score.written_bound_us):
            best.offer(_as_written(problem), "compute as written")
        names = tuple(problem.program.ops[p].name for p in best.order)
        return Schedule(spec(self), names, explain(placement, best.order, best.how))

    def _moved(self, problem: Problem) -> Iterator[tuple[tuple[int, ...], str]]:
        """Orders with compute moved, by position, the most promising first."""
        orders = problem.once(ComputeOrders)
        filled = [
            (
                orders.filled(
                    Filling(self.put_off * orders.compute_us, problem.budget_bytes, share * orders.compute_us)
                ),
                share,
            )
            for share in _AHEAD_SHARES
        ]
        for made, share in sorted(filled, key=lambda pair: pair[0].end_us)[:_SCHEDULED]:
            order, _ = LatestStart().order(orders.problem(made, problem.budget_bytes))
            yield tuple(made.order[position] for position in order), f"compute moved, up to {share:.0%} of it ahead"


def _as_written(problem: Problem) -> tuple[int, ...]:
    return LatestStart().order(problem)[0]


class _Best:
    """The best order so far: within the budget, then by score, then by peak."""

    def __init__(self, problem: Problem) -> None:
        self.score = Score(problem)
        self.order, self.how = tuple(range(len(problem.program.ops))), "as written"
        self._value = (True, math.inf, 0)

    def offer(self, order: tuple[int, ...], how: str) -> None:
        peak_bytes = self.score.peak_bytes(order)
        value = (not self.score.fits(peak_bytes), self.score.of(order), peak_bytes)
        if value < self._value:
            self._value, self.order, self.how = value, order, how

    def is_close(self) -> bool:
        """Whether looking further would buy next to nothing."""
        return not self._value[0] and self.score.is_close(self._value[1])

    def beats(self, score_us: float) -> bool:
        """Whether it is within the budget and no worse than that."""
        return not self._value[0] and self._value[1] <= score_us
