"""One call of the backend: its options, the plans of its graphs, and the report."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from compile_backends import roll_call
from compile_backends.identity import capture_digest, place_in_world, rank_of_world, source_digest
from compile_backends.trail import with_trail
from overlap_pass.config import Config
from overlap_pass.cost.hardware import Hardware
from overlap_pass.errors import OptionError, PlanError
from overlap_pass.fsdp.gather import drop_unused_gathers, gathers_in
from overlap_pass.fsdp.summary import captured
from overlap_pass.graph.program import Phase, Program
from overlap_pass.graph.read import phase_of, read_program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.staging import gathers_bytes
from overlap_pass.planning import Plan, budget_within, make_plan, replay
from overlap_pass.profiling.environment import device_name, is_first_rank
from overlap_pass.profiling.modes import launching, mode_patches
from overlap_pass.profiling.plans import announce
from overlap_pass.report.from_plans import compare_plans, write
from overlap_pass.rewrite.ahead import could_be_ahead, take_ahead, wait_late
from overlap_pass.rewrite.coalesce import coalesce_nodes
from overlap_pass.rewrite.over_gloo import gather_by_base
from overlap_pass.rewrite.places import give_places
from overlap_pass.rewrite.reorder import reorder
from overlap_pass.rewrite.reshard import PartitionByBudget
from overlap_pass.rewrite.transport import carry
from overlap_pass.saved_plans import SavedPlans, pinned
from overlap_pass.schedule.ahead import Room, launched_ahead
from overlap_pass.schedule.late import put_off
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.transport.choice import Carriers
from overlap_pass.units import format_bytes

__all__ = ["Compilation"]

_log = logging.getLogger("overlap_pass")


@dataclass
class Compilation:
    """State of one ``backend(gm, example_inputs, options=…)`` call; both lowerings drive it.

    Attributes:
        config: the user's options, checked.
        hardware: what costs are taken from; the same on every rank.
        carriers: what carries its collectives.
        identity: digest of all that shapes a plan besides the graph, for compile caches.
        by_budget: with ``reshard="auto"``, the partitioner that decides what stays from forward to backward.
        captured: what the graph gathers, in words; ``None`` for nothing.
        ahead: whether the first gathers of a forward may be launched by the step before it.
        saved: this rank's saved plans, if these are to be run.
        plans: one per planned graph, in the order of compilation (forward first).
        call: what the graph planned last launches, if ranks are to compare that before it runs.
    """

    config: Config
    hardware: Hardware
    carriers: Carriers
    identity: str
    by_budget: PartitionByBudget | None = None
    captured: str | None = None
    ahead: bool = False
    saved: SavedPlans | None = None
    plans: list[Plan] = field(default_factory=list)
    call: roll_call.Call | None = None

    @classmethod
    def begin(cls, gm: fx.GraphModule, config: Config) -> Compilation:
        drop_unused_gathers(gm)
        hardware = launching(config.hardware_for(device_name()), config.mode)
        carriers = Carriers(config.transport, config.reduction)
        saved = None if config.plan is None else SavedPlans.load(config.plan, *place_in_world())
        shaped_by = (
            source_digest(),
            config.digest,
            hardware.name,
            carriers.identity,
            rank_of_world(),
            capture_digest(gm),
            *(() if saved is None else (saved.digest,)),
        )
        identity = "-".join(shaped_by)
        by_budget = PartitionByBudget(hardware, config.memory_budget, carriers) if config.reshard == "auto" else None
        return cls(config, hardware, carriers, identity, by_budget, captured(gm), _may_be_ahead(gm, config), saved)

    def prepare(self, graph: fx.Graph) -> None:
        """Plan a forward or backward graph, in place, and write what it launches as its communicators can take it."""
        self.schedule(graph)
        gather_by_base(graph)

    def schedule(self, graph: fx.Graph) -> None:
        """Plan one forward or backward graph and put its nodes into the planned order, in place."""
        self.call = None
        carry(graph, self.carriers)
        phase = phase_of(graph)
        program = read_program(graph, phase, name=phase.value, pure=self.config.pure_namespaces)
        if not program.launches:
            return
        plan = self._planned(program)
        coalesce_nodes(graph, plan.coalesced)
        reorder(graph, plan.schedule.order)
        plan = self._across_steps(graph, program, plan)
        give_places(graph, plan.program.leases)
        self.plans.append(plan)
        if roll_call.wanted():
            self.call = roll_call.Call(plan.program.name, roll_call.communicators(graph), plan.launch_lines)
        announce(plan)
        _log.info(plan.summary())
        if plan.program.leases:
            shared = format_bytes(gathers_bytes(plan.program))
            _log.info("%s: gathered parameters lie in %s that the ranks share", plan.program.name, shared)
        for across in filter(None, (plan.ahead, plan.late)):
            _log.info("%s: %s", plan.program.name, across.summary())
        for note in plan.notes:
            _log.info("%s: %s", plan.program.name, note)
        if self.config.save_plan is not None:
            self._save(self.config.save_plan, program, plan)
        if self.config.report is not None and is_first_rank():
            self._report(self.config.report)

    @property
    def _budget(self) -> Budget:
        return self.config.memory_budget if self.by_budget is None else self.by_budget.budget

    def _planned(self, program: Program) -> Plan:
        budget = budget_within(self._budget, program, self.plans)
        if self.saved is not None:
            return replay(program, self.hardware, budget, self.saved.of(program))
        # What is gathered across the step's edge goes over the communicator, into memory of its own.
        final_places = self.config.launches.final_places and not self.ahead
        launches = replace(self.config.launches, final_places=final_places)
        return make_plan(program, self.hardware, self.config.strategy, budget, launches=launches)

    def _across_steps(self, graph: fx.Graph, written: Program, plan: Plan) -> Plan:
        """The plan with what crosses the edge between steps: gathers that are taken and waits that are put off, in place."""
        if not self.ahead or isinstance(self.config.strategy, AsWritten):
            return plan
        if plan.program.leases:
            raise PlanError(
                f"the saved plan of graph {written.name!r} has places for what a StepEdge gathers in its own way: save it again "
                "with the StepEdge"
            )
        if written.phase is Phase.BACKWARD:
            late = put_off(plan.program, plan.schedule.order, plan.after)
            wait_late(graph, () if late is None else late.waits)
            return replace(plan, late=late)
        if written.phase is not Phase.FORWARD:
            return plan
        room = Room(plan.budget_bytes, self._budget.extra_over_written(written))
        alike, possible = self.config.launch_order == "agreed", could_be_ahead(graph)
        ahead = launched_ahead(plan.program, self.hardware, plan.schedule.order, possible, room, alike=alike)
        if ahead is not None:
            take_ahead(graph, ahead.launches)
        return replace(plan, ahead=ahead)

    def guarded(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """The code of the graph planned last; where debugging is wanted behind a comparison of ranks, and watched."""
        if self.call is None:
            return run
        watched = with_trail(run, self.call.graph, self.call.lines, roll_call.limit_s())
        return roll_call.with_roll_call(watched, self.call)

    def _save(self, folder: Path, program: Program, plan: Plan) -> None:
        """Beside the plans of other graphs that are there already."""
        place = place_in_world()
        try:
            there = SavedPlans.load(folder, *place)
        except PlanError:  # none, or of no more use
            there = SavedPlans(*place)
        try:
            there.with_plans([pinned(program, plan)]).save(folder)
        except OSError as error:
            raise PlanError(f"save_plan={str(folder)!r} cannot be written: {error.strerror or error}") from error

    def _report(self, path: Path) -> None:
        try:
            write(compare_plans(self.plans, setting=self._setting()), path)
        except OSError as error:
            raise PlanError(f"report={str(path)!r} cannot be written: {error.strerror or error}") from error

    def _setting(self) -> tuple[tuple[str, str], ...]:
        pairs = {"torch": torch.__version__, "hardware": self.hardware.name, **dict(self.config.in_effect)}
        if self.captured is not None:
            pairs["captured"] = self.captured
        if self.by_budget is not None:
            pairs.update(self.by_budget.setting())
        return tuple(pairs.items())


def _may_be_ahead(gm: fx.GraphModule, config: Config) -> bool:
    """Whether a StepEdge is there for what the graph gathers.

    Raises:
        OptionError: the graph is to be recorded, and a record cannot take what is there once.
    """
    if not any(spec.ahead for spec, _ in gathers_in(gm)):
        return False
    if mode_patches(config.mode).get("triton.cudagraphs", inductor_config.triton.cudagraphs):
        raise OptionError(
            f"mode={config.mode!r} records CUDA graphs, and a StepEdge launches gathers outside of them: leave one of the two out"
        )
    return True
