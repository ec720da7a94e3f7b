"""``fill_gaps``: compute that nothing waits for moves to where the critical chain is blocked, then ``latest_start``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Role
from overlap_pass.schedule.compute_order import Filling, refill
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["FillGaps"]

_AHEAD_SHARES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
_SCHEDULED = 2
_QUICK = LatestStart(margin=1.5)


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
        placement = Placement.of(problem)
        index = problem.program.index
        score = Score(problem)
        best: tuple[tuple[bool, float, int], tuple[int, ...], str] | None = None
        for names, how in self._candidates(problem, placement):
            order = tuple(index[name] for name in names)
            peak_bytes = score.peak_bytes(order)
            found = (not score.fits(peak_bytes), score.of(names), peak_bytes)
            if best is None or found < best[0]:
                best = (found, order, how)
            if not best[0][0] and score.is_close(best[0][1]):
                break
        if best is None:
            return Schedule(spec(self), problem.program.order)
        names = tuple(problem.program.ops[p].name for p in best[1])
        return Schedule(spec(self), names, explain(placement, best[1], best[2]))

    def _candidates(self, problem: Problem, placement: Placement) -> Iterator[tuple[tuple[str, ...], str]]:
        yield LatestStart().schedule(problem).order, "compute as written"
        if not any(move.role is Role.ACTIVATION for move in placement.moves):
            return
        compute_us = sum(problem.costs.duration_us[problem.program.ops[p].name] for p in placement.anchors)
        filled = []
        for share in _AHEAD_SHARES:
            filling = Filling(self.put_off * compute_us, problem.budget_bytes, share * compute_us)
            filled.append((refill(placement, problem.costs, filling), share))
        for made, share in sorted(filled, key=lambda pair: pair[0].end_us)[:_SCHEDULED]:
            moved = Problem(build_dag(made.program), problem.costs, problem.budget_bytes)
            yield _QUICK.schedule(moved).order, f"compute moved, up to {share:.0%} of it ahead"
