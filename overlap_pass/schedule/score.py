"""How good an order is: its simulated step, also if communication is slower than the cost model thinks, and its peak.

An order tuned to one set of prices is brittle: where a gather is launched just in time, a link that is somewhat slower
than its price turns every launch into a stall. So an order is judged by the mean of two steps, one at the prices given
and one with every collective ``PESSIMISM`` times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from overlap_pass.memory.ledger import Ledger, Lifetimes
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
        return (self.step_us(order) + self._slower.step_us(order)) / 2

    def step_us(self, order: Sequence[str]) -> float:
        """The simulated step at the prices given."""
        return self._expected.step_us(order)

    def peak_bytes(self, order: Iterable[int]) -> int:
        """The peak of an order of positions."""
        ledger = Ledger(self._lifetimes)
        for position in order:
            ledger.advance(position)
        return ledger.peak_bytes

    def fits(self, peak_bytes: int) -> bool:
        """Whether the budget allows that much."""
        return self._problem.budget_bytes is None or peak_bytes <= self._problem.budget_bytes

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes(self._problem.program)

    @cached_property
    def _expected(self) -> Simulator:
        return Simulator(self._problem.program, self._problem.costs)

    @cached_property
    def _slower(self) -> Simulator:
        costs = self._problem.costs
        longer = {op.name: costs.duration_us[op.name] * PESSIMISM for op in self._problem.program.launches}
        return Simulator(self._problem.program, replace(costs, duration_us={**costs.duration_us, **longer}))
