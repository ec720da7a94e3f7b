"""Program in, plan out: price, budget, schedule, prove, simulate, compare with the order as written.

The stages are called here and nowhere else, so that the backend, the command line and the tests plan alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.errors import InfeasibleBudget
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.ledger import MemoryProfile, peak
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.feeding import tight
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.types import Problem, Schedule, Strategy
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.bound import Bound, lower_bound
from overlap_pass.simulate.engine import Simulation, simulate
from overlap_pass.units import format_bytes, format_us

__all__ = ["Plan", "make_plan"]

_log = logging.getLogger("overlap_pass")


@dataclass(frozen=True)
class Plan:
    """A schedule with its proof: what it does to the step, to the peak, and how far it is from the bound.

    Attributes:
        program: the graph, in the order as written.
        schedule: the order to run (that of the graph as written if nothing better was found).
        before, after: simulated timelines as written and as scheduled.
        memory_before, memory_after: predicted memory of both orders.
        budget_bytes: the bound that was kept, ``None`` for none.
        bound: no legal order that keeps the compute order is faster than this.
        hardware: name of the hardware file.
        notes: what the reader should know (a refused schedule, ops without a price, …).
    """

    program: Program
    schedule: Schedule
    before: Simulation
    after: Simulation
    memory_before: MemoryProfile
    memory_after: MemoryProfile
    budget_bytes: int | None
    bound: Bound
    hardware: str
    notes: tuple[str, ...] = ()

    @property
    def gap_percent(self) -> float:
        """How much longer than the bound the scheduled step is."""
        return 100.0 * (self.after.step_us / self.bound.step_us - 1.0) if self.bound.step_us else 0.0

    @property
    def skeleton(self) -> str:
        """Hash of the launch order: ranks whose hashes agree issue the same collectives in the same order."""
        launches = [self.program.op(n).collective for n in self.schedule.order if self.program.op(n).collective]
        text = json.dumps([(c.kind, c.group, c.payload_bytes, c.dtype) for c in launches if c is not None])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> str:
        """One line for a log."""
        return (
            f"{self.program.name}: {len(self.program.launches)} collectives, {self.schedule.strategy}: step "
            f"{format_us(self.before.step_us)} → {format_us(self.after.step_us)}, exposed "
            f"{format_us(self.before.exposed_us)} → {format_us(self.after.exposed_us)}, peak "
            f"{format_bytes(self.memory_before.peak_bytes)} → {format_bytes(self.memory_after.peak_bytes)}, "
            f"{self.gap_percent:.1f} % above the bound (predicted, {self.hardware})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "program": {"name": self.program.name, "phase": self.program.phase.value, "digest": self.program.digest},
            "schedule": self.schedule.to_json(),
            "hardware": self.hardware,
            "budget_bytes": self.budget_bytes,
            "predicted": {
                "step_us": [self.before.step_us, self.after.step_us],
                "exposed_us": [self.before.exposed_us, self.after.exposed_us],
                "peak_bytes": [self.memory_before.peak_bytes, self.memory_after.peak_bytes],
                "bound_us": self.bound.step_us,
                "bound_by": self.bound.by,
            },
            "skeleton": self.skeleton,
            "notes": list(self.notes),
        }


def make_plan(
    program: Program,
    hardware: Hardware,
    strategy: Strategy,
    budget: Budget,
    *,
    measured: Mapping[str, float] | None = None,
) -> Plan:
    """Plan one graph.

    The schedule is used only if it is legal, keeps the budget and is not slower than the order as written in the
    simulator; else the order as written is planned and a note says why.

    Raises:
        InfeasibleBudget: no order of this graph fits; the message names the smallest budget that does.
    """
    dag = build_dag(program)
    costs = price(program, hardware, measured=measured)
    memory_before = peak(program)
    budget_bytes = budget.resolve(program, memory_before.peak_bytes)
    problem = Problem(dag, costs, budget_bytes)
    if budget_bytes is not None and memory_before.peak_bytes > budget_bytes:
        _check_feasible(problem, budget_bytes, memory_before)
    before = simulate(program, costs, label="as written")
    schedule = strategy.schedule(problem)
    schedule, notes = _accepted(problem, schedule, before)
    after = simulate(program, costs, schedule.order, label="scheduled")
    return Plan(
        program=program,
        schedule=schedule,
        before=before,
        after=after,
        memory_before=memory_before,
        memory_after=peak(program, schedule.order),
        budget_bytes=budget_bytes,
        bound=lower_bound(dag, costs),
        hardware=costs.hardware,
        notes=(*notes, *_unpriced(costs)),
    )


def _check_feasible(problem: Problem, budget_bytes: int, memory_before: MemoryProfile) -> None:
    smallest_bytes = min(Room.of(Placement(problem.dag)).smallest_bytes, memory_before.peak_bytes)
    if smallest_bytes > budget_bytes:
        raise InfeasibleBudget(
            f"memory_budget of {format_bytes(budget_bytes)} is below what graph {problem.program.name!r} needs in any "
            f"order (peak {format_bytes(memory_before.peak_bytes)} at {memory_before.peak_op!r} as written); smallest "
            f"budget that fits: {smallest_bytes} bytes ({format_bytes(smallest_bytes)})",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest_bytes,
        )


def _accepted(problem: Problem, schedule: Schedule, before: Simulation) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule if it keeps every promise, else a safe order with the reason."""
    program, budget_bytes = problem.program, problem.budget_bytes
    broken = violations(program, schedule.order)
    if broken:
        note = f"{schedule.strategy} made an illegal order and was dropped: {broken[0]}"
        _log.error("%s: %s", program.name, note)
        return _safe(problem), (note,)
    peak_bytes = peak(program, schedule.order).peak_bytes
    if budget_bytes is not None and peak_bytes > budget_bytes:
        note = (
            f"{schedule.strategy} would reach {format_bytes(peak_bytes)}, over the budget of "
            f"{format_bytes(budget_bytes)}, and was dropped"
        )
        _log.warning("%s: %s", program.name, note)
        return _safe(problem), (note,)
    after = simulate(program, problem.costs, schedule.order)
    if after.step_us > before.step_us and _fits(problem, program.order):
        note = (
            f"{schedule.strategy} is predicted at {format_us(after.step_us)}, the order as written at "
            f"{format_us(before.step_us)}; the order as written is kept"
        )
        return AsWritten().schedule(problem), (note,)
    return schedule, ()


def _fits(problem: Problem, order: tuple[str, ...]) -> bool:
    return problem.budget_bytes is None or peak(problem.program, order).peak_bytes <= problem.budget_bytes


def _safe(problem: Problem) -> Schedule:
    """The order as written, or that of least memory where only this one keeps the budget."""
    if _fits(problem, problem.program.order):
        return AsWritten().schedule(problem)
    placement = Placement(problem.dag)
    order = place(placement, tight(placement))
    names = tuple(problem.program.ops[position].name for position in order)
    return Schedule("least_memory", names, explain(placement, order, "least memory, to keep the budget"))


def _unpriced(costs: CostTable) -> tuple[str, ...]:
    if not costs.unknown:
        return ()
    shown = ", ".join(costs.unknown[:5])
    return (f"{len(costs.unknown)} ops priced by memory traffic alone (no formula): {shown}",)
