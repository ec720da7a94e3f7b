"""How good an order is: its simulated step, also if communication is slower than the cost model thinks, and its peak.

An order tuned to one set of prices is brittle: where a gather is launched just in time, a link that is somewhat slower
than its price turns every launch into a stall. So an order is judged by the mean of two steps, one at the prices given
and one with every collective ``PESSIMISM`` times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.once import once
from overlap_pass.graph.program import Role
from overlap_pass.memory.ledger import Lifetimes
from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.bound import fixed_compute, step_bound_us
from overlap_pass.simulate.engine import Simulator
from overlap_pass.simulate.loads import busiest_lane_us
from overlap_pass.simulate.precedence import Precedence

__all__ = ["CLOSE", "PESSIMISM", "Score"]

CLOSE = 0.001
PESSIMISM = 1.3


class Score:
    """Judge of many orders of one problem, by position; what it is made of is made once for all budgets."""

    def __init__(self, problem: Problem) -> None:
        self.budget_bytes = problem.budget_bytes
        self._judge = problem.once_for_all(_Judge)
        self._places = problem.once(self._judge.places)
        self._lifetimes = once(problem.program, Lifetimes)
        self._peaks_bytes = problem.once(_no_peaks)
        self._last: tuple[Sequence[int], tuple[int, ...]] = ((), ())

    def of(self, order: Sequence[int]) -> float:
        """Mean step in microseconds; smaller is better."""
        return self._judge.score_us(self._judged(order))

    def below(self, order: Sequence[int], best_us: float) -> float:
        """The score where it is at most ``best_us``, else infinity, often after a part of one simulation instead of two."""
        return self._judge.score_below_us(self._judged(order), best_us)

    def blocked_us(self, order: Sequence[int]) -> Mapping[str, float]:
        """Launch → how long its waits hold the compute lane, at the prices given."""
        return self._judge.blocked_us(self._judged(order))

    def step_us(self, order: Sequence[int]) -> float:
        """The simulated step at the prices given."""
        return self._judge.step_us(self._judged(order))

    def _judged(self, order: Sequence[int]) -> tuple[int, ...]:
        """The order in the positions of the program that the judge knows."""
        if self._places is None:
            return tuple(order)
        if self._last[0] is not order:
            judged = tuple([self._places[position] for position in order])
            if not isinstance(order, tuple):
                return judged
            self._last = (order, judged)
        return self._last[1]

    @property
    def bound_us(self) -> float:
        """No legal order scores less; where nothing but shards is communicated, none that keeps compute as written."""
        return self._judge.bound_us

    @property
    def floor_us(self) -> float:
        """No order scores less, whatever its launches wait for; takes far less time to say than the bound."""
        return self._judge.floor_us

    def is_close(self, score_us: float) -> bool:
        """Whether a score is so near to the bound that looking further would buy next to nothing."""
        return score_us <= self.bound_us * (1 + CLOSE)

    def peak_bytes(self, order: Sequence[int]) -> int:
        """The peak of an order of positions."""
        key = tuple(order)
        known = self._peaks_bytes.get(key)
        if known is None:
            known = self._peaks_bytes[key] = self._lifetimes.peak_bytes(key)
        return known

    def fits(self, peak_bytes: int) -> bool:
        """Whether the budget allows that much."""
        return self.budget_bytes is None or peak_bytes <= self.budget_bytes


def _no_peaks(_: Problem) -> dict[tuple[int, ...], int]:
    return {}


@dataclass(slots=True)
class _Known:
    """What has been found out about an order: its step and its score, infinite until then, and what the score is above."""

    step_us: float = math.inf
    score_us: float = math.inf
    above_us: float = -math.inf


class _Judge:
    """One program under two prices, in whatever order its ops are written."""

    def __init__(self, problem: Problem) -> None:
        self._dag, self._costs = problem.dag, problem.costs
        self._known: dict[tuple[int, ...], _Known] = {}

    def places(self, problem: Problem) -> tuple[int, ...] | None:
        """The positions here of the ops of a problem whose program is written in another order; ``None`` for the same."""
        if problem.program is self._dag.program:
            return None
        return tuple(self._dag.program.index[op.name] for op in problem.program.ops)

    def score_us(self, order: tuple[int, ...]) -> float:
        return self.score_below_us(order, math.inf)

    def score_below_us(self, order: tuple[int, ...], best_us: float) -> float:
        known = self._known_of(order)
        if known.score_us == math.inf and known.above_us < best_us:
            step_us = self._step_us(order, known, 2 * best_us - self._floors_us[1])
            limit_us = 2 * best_us - step_us
            if step_us < math.inf:
                known.score_us = (step_us + self._simulator.step_us(order, limit_us, stretch=PESSIMISM)) / 2
            if known.score_us == math.inf:
                known.above_us = best_us
        return known.score_us if known.score_us <= best_us else math.inf

    def step_us(self, order: tuple[int, ...]) -> float:
        return self._step_us(order, self._known_of(order), math.inf)

    def _step_us(self, order: tuple[int, ...], known: _Known, limit_us: float) -> float:
        if known.step_us == math.inf:
            known.step_us = self._simulator.step_us(order, limit_us)
        return known.step_us if known.step_us <= limit_us else math.inf

    def _known_of(self, order: tuple[int, ...]) -> _Known:
        known = self._known.get(order)
        if known is None:
            known = self._known[order] = _Known()
        return known

    def blocked_us(self, order: tuple[int, ...]) -> Mapping[str, float]:
        return self._simulator.blocked_us(order)

    @property
    def floor_us(self) -> float:
        return sum(self._floors_us) / 2

    @cached_property
    def _floors_us(self) -> tuple[float, float]:
        """No order takes less at either price: what the busiest lane has to do."""
        program = self._dag.program
        return busiest_lane_us(program, self._costs), busiest_lane_us(program, self._slower_costs)

    @cached_property
    def bound_us(self) -> float:
        program = self._dag.program
        launches = (op.collective for op in program.launches)
        moves_compute = any(found is not None and found.role is Role.ACTIVATION for found in launches)
        fixed = () if moves_compute else fixed_compute(program)
        facts = Precedence(self._dag, self._costs, fixed)
        expected_us = step_bound_us(facts, program, self._costs)
        slower_us = step_bound_us(facts.at(self._slower_costs), program, self._slower_costs)
        return (expected_us + slower_us) / 2

    @cached_property
    def _simulator(self) -> Simulator:
        return Simulator(self._dag.program, self._costs)

    @cached_property
    def _slower_costs(self) -> CostTable:
        longer = {op.name: self._costs.duration_us[op.name] * PESSIMISM for op in self._dag.program.launches}
        return replace(self._costs, duration_us={**self._costs.duration_us, **longer})
