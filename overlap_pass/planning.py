"""Program in, plan out: price, budget, schedule, prove, simulate, compare with the order as written.

The stages are called here and nowhere else, so that the backend, the command line and the tests plan alike.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.cost.rest import as_rested
from overlap_pass.errors import IllegalSchedule, InfeasibleBudget, PlanError
from overlap_pass.graph.once import once
from overlap_pass.graph.program import Phase, Program
from overlap_pass.memory.budget import Beside, Budget
from overlap_pass.memory.leases import placed
from overlap_pass.memory.ledger import Lifetimes, MemoryProfile, compiled_peak, peak, resident_bytes
from overlap_pass.memory.staging import gathers_bytes
from overlap_pass.registry import parse
from overlap_pass.schedule import notes
from overlap_pass.schedule.ahead import Ahead
from overlap_pass.schedule.alike import Terms, choose_alike
from overlap_pass.schedule.asked import as_asked, unheeded
from overlap_pass.schedule.choice import Choice, choose
from overlap_pass.schedule.coalescing import Group, apart, coalesce, unjoinable
from overlap_pass.schedule.collection import collection_put_off
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.late import Late
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.leasing import leased_if_shorter
from overlap_pass.schedule.pinned import Pinned
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import least_bytes
from overlap_pass.schedule.skeleton import hash_of, lines_of
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.strategies.backward_post import BackwardPost
from overlap_pass.schedule.strategies.backward_pre import BackwardPre
from overlap_pass.schedule.types import Problem, Schedule, Strategy
from overlap_pass.schedule.variants import Variant, variants
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.bound import Bound, fixed_compute, lower_bound
from overlap_pass.simulate.engine import Simulation, simulate
from overlap_pass.units import format_bytes, format_us

__all__ = ["Plan", "bound_of", "budget_within", "make_plan", "plan_step", "replay"]

_log = logging.getLogger("overlap_pass")

_ALIKE = "all ranks have to launch in one order, and that is made without this rank's prices"
_ASKED = "launches are joined to the size that coalesce asks for, in the order that launch_order asks for"


@dataclass(frozen=True)
class Plan:
    """A schedule with its proof: what it does to the step, to the peak, and how far it is from the bound.

    Attributes:
        program: the graph, in the order as written, with the launches of ``coalesced`` joined.
        coalesced: launches of the graph that become one.
        schedule: the order to run (that of the graph as written if nothing better was found).
        before, after: simulated timelines as written and as scheduled.
        memory_before, memory_after: memory of both orders, op by op: what compiled code takes at most.
        budget_bytes: the bound that was kept, ``None`` for none.
        bound: no legal order is faster than this; where the schedule keeps the order of compute, none that keeps it too.
        hardware: name of the hardware file.
        notes: what the reader should know (a refused schedule, ops without a price, …).
        ahead: gathers that the step before launches; the figures above are those of a step whose gathers it does not.
        late: waits that are left to the step behind; the figures above are those of a step that waits itself.
    """

    program: Program
    coalesced: tuple[Group, ...]
    schedule: Schedule
    before: Simulation
    after: Simulation
    memory_before: MemoryProfile
    memory_after: MemoryProfile
    budget_bytes: int | None
    bound: Bound
    hardware: str
    notes: tuple[str, ...] = ()
    ahead: Ahead | None = None
    late: Late | None = None

    @property
    def gap_percent(self) -> float:
        """How much longer than the bound the scheduled step is."""
        return 100.0 * (self.after.step_us / self.bound.step_us - 1.0) if self.bound.step_us else 0.0

    @property
    def cpu_ahead_us(self) -> float:
        """How long before the end of the step the CPU has issued all of it; 0 where the CPU is what takes longest."""
        return max(0.0, self.after.step_us - self.after.cpu_us)

    @cached_property
    def compiled_peak_bytes(self) -> int:
        """What compiled code is expected to take: an estimate, where ``memory_after`` is a bound."""
        resident_bytes = self.memory_after.base_bytes - once(self.program, Lifetimes).base_bytes
        return compiled_peak(self.program, self.schedule.order, resident_bytes=resident_bytes).peak_bytes

    @property
    def skeleton(self) -> str:
        """Hash of the launch order: ranks whose hashes agree issue the same collectives in the same order."""
        return hash_of(self.launch_lines)

    @property
    def launch_lines(self) -> tuple[str, ...]:
        """A line for each launch, in the planned order."""
        return lines_of(self.program, self.schedule.order)

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
            "coalesced": [list(group.members) for group in self.coalesced],
            "schedule": self.schedule.to_json(),
            "hardware": self.hardware,
            "budget_bytes": self.budget_bytes,
            "predicted": {
                "step_us": [self.before.step_us, self.after.step_us],
                "exposed_us": [self.before.exposed_us, self.after.exposed_us],
                "peak_bytes": [self.memory_before.peak_bytes, self.memory_after.peak_bytes],
                "compiled_peak_bytes": self.compiled_peak_bytes,
                "shared_for_gathers_bytes": gathers_bytes(self.program),
                "bound_us": self.bound.step_us,
                "bound_by": self.bound.by,
            },
            "ahead": self.ahead and self.ahead.to_json(),
            "late": self.late and self.late.to_json(),
            "skeleton": self.skeleton,
            "notes": list(self.notes),
        }


def budget_within(budget: Budget, program: Program, before: Sequence[Plan]) -> Budget:
    """The budget of one graph of a step: a backward counts what the process holds and shares for the forward planned before it,
    and begins with the CPU as far ahead as that forward leaves it."""
    if program.phase is not Phase.BACKWARD or not before:
        return budget
    last = before[-1]
    shared, staged = (gathers_bytes(last.program, leases=leases) for leases in (True, False))
    return Beside(budget, resident_bytes(last.program, program), last.cpu_ahead_us, shared, staged)


def plan_step(
    programs: Sequence[Program],
    hardware: Hardware,
    strategy: Strategy,
    budget: Budget,
    *,
    launches: Launches | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[Plan, ...]:
    """Plan the graphs of one step, forward first: :func:`make_plan` for each.

    Args:
        progress: called with what is being done.

    Raises:
        InfeasibleBudget: as for :func:`make_plan`, but the message names the smallest budget that fits all graphs.
        PlanError: the limit on communicators in flight cannot be kept.
    """
    plans: list[Plan] = []
    for program in programs:
        progress(f"planning {program.name}: {len(program.ops)} ops, {len(program.launches)} collectives")
        within = budget_within(budget, program, plans)
        try:
            plans.append(make_plan(program, hardware, strategy, within, launches=launches))
        except InfeasibleBudget as error:
            raise _of_step(error, [_to_keep(one, strategy, launches)[0] for one in programs]) from error
    return tuple(plans)


def _of_step(error: InfeasibleBudget, programs: Sequence[Program]) -> InfeasibleBudget:
    """The error of one graph with the budget that all graphs of its step need."""
    needed: list[tuple[int, str]] = []
    for number, program in enumerate(programs):
        beside = programs[number - 1] if number and program.phase is Phase.BACKWARD else None
        beside_bytes = 0 if beside is None else resident_bytes(beside, program)
        program = program if beside is None else replace(program, shared_bytes=gathers_bytes(beside))
        needed.append((least_bytes(program) + beside_bytes, program.name))
    smallest_bytes, name = max(needed)
    return InfeasibleBudget(
        f"memory_budget of {format_bytes(error.budget_bytes)} is below what the step needs in any order that was found, most "
        f"of all in graph {name!r}; smallest budget that fits: {smallest_bytes} bytes ({format_bytes(smallest_bytes)})",
        budget_bytes=error.budget_bytes,
        smallest_bytes=smallest_bytes,
    )


@collection_put_off()
def make_plan(
    program: Program,
    hardware: Hardware,
    strategy: Strategy,
    budget: Budget,
    *,
    launches: Launches | None = None,
    measured: Mapping[str, float] | None = None,
) -> Plan:
    """Plan one graph.

    A schedule is used only if it is legal and keeps the budget. With ``"priced"`` launches it is not slower than the order as
    written either, else that is planned and a note says why. With ``"agreed"`` ones, what is joined and the order of
    launches are settled by what all ranks see alike. A size of joined launches that is asked for is kept where it fits the
    budget, else a note says so. In both cases a note says where the order as written is faster here.

    Args:
        launches: how they may be joined and ordered.
        measured: op name → microseconds, over the cost model's.

    Raises:
        InfeasibleBudget: no order of this graph fits; the message names the smallest budget that does (a backward of it may
            need more: :func:`plan_step` looks at both).
        PlanError: the limit on communicators in flight cannot be kept.
    """
    asked = launches or Launches()
    program, launches = _to_keep(replace(program, shared_bytes=budget.shared_bytes), strategy, launches)
    written = _Written.of(program, hardware, budget, measured)
    _check_feasible(written)
    by_unit = isinstance(strategy, BackwardPre | BackwardPost)  # which count units, and gather none further ahead
    found = variants(program, written.price, launches.target_bytes, across_units=not by_unit)
    within_bytes = written.graph_budget_bytes
    if launches.order == "agreed":
        terms = Terms(strategy, budget, within_bytes, launches.asked, launches.final_places)
        chosen = choose_alike(found, terms, written.price)
    else:
        chosen = choose(as_asked(found, launches, within_bytes), strategy, within_bytes)
        chosen = leased_if_shorter(chosen, written.price, budget, within_bytes) if launches.final_places else chosen
    broken = violations(program, apart(chosen.schedule.order, chosen.variant.groups))
    if broken:  # what was joined and how it is ordered, against the graph as it came
        safe = make_plan(program, hardware, parse(AsWritten.name), budget, launches=launches, measured=measured)
        return _dropped(broken[0], safe)
    kept = unheeded(found, asked, chosen.variant, written.budget_bytes)
    return written.plan(replace(chosen, notes=(*chosen.notes, *kept)), slower=_ASKED if launches.asked else _ALIKE)


def _to_keep(program: Program, strategy: Strategy, launches: Launches | None) -> tuple[Program, Launches]:
    """The program with what its schedules have to keep."""
    launches = launches or Launches()
    program = launches.bind(program)
    if isinstance(strategy, AsWritten):  # asked to change nothing; the order as written is that of all ranks
        launches = replace(launches, coalesce="off", order="priced", final_places=False)
        program = replace(program, launches_fixed=launches.most_in_flight is not None)
    return program, launches


def replay(program: Program, hardware: Hardware, budget: Budget, pinned: Pinned) -> Plan:
    """The plan of a graph from its saved order, proven and priced as any other.

    Raises:
        PlanError: it is of another graph, not the one that was saved, or above the budget.
        IllegalSchedule: it breaks a promise of the graph.
    """
    problem = unjoinable(program, pinned.groups) if pinned.fits(program) else "it is of another graph"
    if problem:
        raise PlanError(f"the saved plan of graph {program.name!r} cannot be used: {problem}")
    program = replace(program, activations_free=pinned.activations_free, shared_bytes=budget.shared_bytes)
    written = _Written.of(program, hardware, budget, None)
    joined, order = coalesce(program, pinned.groups), pinned.schedule.order
    broken = violations(joined, order) or violations(program, apart(order, pinned.groups))
    if not broken and pinned.offsets:
        joined = placed(replace(joined, ops=tuple(map(joined.op, order))), dict(pinned.offsets))
        broken = violations(joined, order)
    if broken:
        raise IllegalSchedule(f"the saved plan of graph {program.name!r} is illegal: {broken[0]}")
    variant = Variant.of(pinned.groups, joined, written.price)
    decisions = explain(Placement(variant.problem.dag), _positions(variant.problem.program, order), "as saved")
    choice = Choice(variant, replace(pinned.schedule, decisions=decisions), ("the order is a saved one",))
    plan = written.plan(choice, slower="that is how it was saved")
    if plan.skeleton != pinned.launches:
        raise PlanError(f"the saved plan of graph {program.name!r} was changed: its launches are not those of its hash")
    if plan.budget_bytes is not None and plan.memory_after.peak_bytes > plan.budget_bytes:
        raise PlanError(
            f"the saved plan of graph {program.name!r} holds {format_bytes(plan.memory_after.peak_bytes)}, more than "
            f"memory_budget allows ({format_bytes(plan.budget_bytes)}): give the budget that it was made for"
        )
    return plan


def _positions(program: Program, order: Sequence[str]) -> tuple[int, ...]:
    return tuple(program.index[name] for name in order)


def _dropped(why: str, safe: Plan) -> Plan:
    """The plan of the order as written, with what was wrong with the one that it stands in for."""
    _log.error("%s: the plan is illegal and is dropped for the order as written: %s", safe.program.name, why)
    return replace(safe, notes=(*safe.notes, f"an illegal plan was dropped: {why}"))


@dataclass(frozen=True)
class _Written:
    """The graph as it came: what every candidate is held against."""

    program: Program
    hardware: Hardware
    measured: Mapping[str, float] | None
    memory: MemoryProfile
    budget_bytes: int | None
    budget: Budget
    simulation: Simulation

    @classmethod
    def of(cls, program: Program, hardware: Hardware, budget: Budget, measured: Mapping[str, float] | None) -> _Written:
        memory = peak(program, resident_bytes=budget.resident_bytes)
        costs = price(program, hardware, measured=measured)
        if (rested := as_rested(hardware, program, costs)) is not hardware:
            hardware, costs = rested, price(program, rested, measured=measured)
        costs = replace(costs, cpu_ahead_us=budget.cpu_ahead_us)
        budget_bytes = budget.resolve(program, memory.peak_bytes)
        simulation = simulate(program, costs, label="as written")
        return cls(program, hardware, measured, memory, budget_bytes, budget, simulation)

    @property
    def resident_bytes(self) -> int:
        return self.budget.resident_bytes

    @property
    def graph_budget_bytes(self) -> int | None:
        """What of the budget is left for what the graph names."""
        return None if self.budget_bytes is None else self.budget_bytes - self.resident_bytes

    def price(self, program: Program) -> CostTable:
        return replace(price(program, self.hardware, measured=self.measured), cpu_ahead_us=self.budget.cpu_ahead_us)

    def plan(self, chosen: Choice, *, slower: str) -> Plan:
        """The order that was chosen, with its proof, and why it may be slower than the one as written."""
        problem, order = chosen.variant.problem, chosen.schedule.order
        after = simulate(problem.program, problem.costs, order, label="scheduled")
        bound = bound_of(problem, order)
        about = (
            *notes.slower(self.simulation, after, slower),
            *notes.by_launches(bound, after),
            *notes.unpriced(problem.costs),
        )
        return Plan(
            program=problem.program,
            coalesced=chosen.variant.groups,
            schedule=chosen.schedule,
            before=self.simulation,
            after=after,
            memory_before=self.memory,
            memory_after=peak(problem.program, order, resident_bytes=self.resident_bytes),
            budget_bytes=self.budget_bytes,
            bound=bound,
            hardware=self.hardware.name,
            notes=(*chosen.notes, *about),
        )


def _check_feasible(written: _Written) -> None:
    budget_bytes, memory, program = written.budget_bytes, written.memory, written.program
    if budget_bytes is None or memory.peak_bytes <= budget_bytes:
        return
    smallest_bytes = least_bytes(program) + written.resident_bytes
    if smallest_bytes > budget_bytes:
        forward = program.phase is Phase.FORWARD
        unknown = "; that is for this graph, a backward of it is planned later and may need more" if forward else ""
        raise InfeasibleBudget(
            f"memory_budget of {format_bytes(budget_bytes)} is below what graph {program.name!r} needs in any order "
            f"that was found (peak {format_bytes(memory.peak_bytes)} at {memory.peak_op!r} as written); smallest budget "
            f"that fits: {smallest_bytes} bytes ({format_bytes(smallest_bytes)}){unknown}",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest_bytes,
        )


def bound_of(problem: Problem, order: tuple[str, ...]) -> Bound:
    """For every order that keeps compute as written; for every legal order where this one does not."""
    at = {name: step for step, name in enumerate(order)}
    steps = [at[name] for name in fixed_compute(problem.program)]
    kept = all(first < second for first, second in itertools.pairwise(steps))
    return lower_bound(problem.dag, problem.costs, fixed=None if kept else ())
