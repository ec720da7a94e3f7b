"""How good an order is: its simulated step, also if communication is slower than the cost model thinks.

An order tuned to one set of prices is brittle: where a gather is launched just in time, a link that is somewhat slower
than its price turns every launch into a stall. So an order is judged by the mean of two steps, one at the prices given
and one with every collective ``PESSIMISM`` times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.engine import Simulator

__all__ = ["PESSIMISM", "Score"]

PESSIMISM = 1.3


class Score:
    """Judge of many orders of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def of(self, order: Sequence[str]) -> float:
        """Mean step in microseconds; smaller is better."""
        return (self._expected.step_us(order) + self._slower.step_us(order)) / 2

    @cached_property
    def _expected(self) -> Simulator:
        return Simulator(self._problem.program, self._problem.costs)

    @cached_property
    def _slower(self) -> Simulator:
        costs = self._problem.costs
        longer = {op.name: costs.duration_us[op.name] * PESSIMISM for op in self._problem.program.launches}
        return Simulator(self._problem.program, replace(costs, duration_us={**costs.duration_us, **longer}))
