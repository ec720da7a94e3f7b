"""From program to plan: what is promised holds, and what goes wrong is said."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import InfeasibleBudget
from overlap_pass.graph.program import Phase, Program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.ledger import peak
from overlap_pass.planning import budget_within, make_plan, plan_step
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.strategies import AsWritten, BackwardPre, LatestStart
from overlap_pass.schedule.types import Problem, Schedule
from tests.pure.programs import Builder

MIB = 2**20
H100 = load_hardware("h100")
OFF = Launches("off", "priced")


def chain(layers: int = 4, *, flops: int = 10**12) -> Program:
    """Layers whose gather (64 MiB) is written where it is used, under matmuls of about 1.5 ms."""
    build = Builder()
    value = build.input("x", MIB, held=True)
    shards = [build.input(f"shard{i}", 32 * MIB, held=True) for i in range(layers)]
    for i, shard in enumerate(shards):
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 64 * MIB, unit=f"block{i}"))
        value = build.compute(f"mm{i}", value, weight, size_bytes=MIB, flops=flops)
    return build.output(value)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A strategy that returns what it is told to."""

    order: tuple[str, ...]
    name: ClassVar[str] = "fixed"

    def schedule(self, problem: Problem) -> Schedule:
        return Schedule(self.name, self.order)


def test_the_plan_hides_what_can_be_hidden() -> None:
    plan = make_plan(chain(8), H100, LatestStart(), Budget.parse("unlimited"))
    assert plan.after.step_us < plan.before.step_us
    assert plan.after.exposed_us < 0.5 * plan.before.exposed_us
    assert plan.after.step_us >= plan.bound.step_us
    assert plan.gap_percent >= 0


@pytest.mark.parametrize("budget", ["1.0x", "+1MiB", "+64MiB", "fsdp2"])
def test_the_peak_keeps_the_budget(budget) -> None:
    plan = make_plan(chain(), H100, LatestStart(), Budget.parse(budget))
    assert plan.budget_bytes is not None
    assert plan.memory_after.peak_bytes <= plan.budget_bytes


def test_a_budget_below_any_order_is_an_error_that_names_the_smallest_one() -> None:
    program = chain()
    with pytest.raises(InfeasibleBudget, match="smallest budget that fits") as caught:
        make_plan(program, H100, LatestStart(), Budget.parse("80MiB"))
    assert caught.value.smallest_bytes <= peak(program).peak_bytes
    plan = make_plan(program, H100, LatestStart(), Budget.parse(caught.value.smallest_bytes))
    assert plan.memory_after.peak_bytes <= caught.value.smallest_bytes


@pytest.mark.parametrize("order", ["agreed", "priced"])
def test_a_step_names_the_budget_that_its_forward_and_its_backward_fit(order: str) -> None:
    """The backward's tensors are four times as large, and beside them it holds a shard that only the forward reads."""
    launches, step = Launches(order=order), (chain(), replace(_larger(chain(3)), phase=Phase.BACKWARD))
    with pytest.raises(InfeasibleBudget, match="backward of it is planned later and may need more") as of_forward:
        make_plan(step[0], H100, LatestStart(), Budget.parse("80MiB"), launches=launches)
    for budget in ("80MiB", of_forward.value.smallest_bytes):  # refused by the forward, by the backward
        with pytest.raises(InfeasibleBudget, match="below what the step needs") as caught:
            plan_step(step, H100, LatestStart(), Budget.parse(budget), launches=launches)
        smallest_bytes = caught.value.smallest_bytes
        assert smallest_bytes > of_forward.value.smallest_bytes
        plans = plan_step(step, H100, LatestStart(), Budget.parse(smallest_bytes), launches=launches)
        assert all(plan.memory_after.peak_bytes <= smallest_bytes for plan in plans)
        with pytest.raises(InfeasibleBudget):
            plan_step(step, H100, LatestStart(), Budget.parse(smallest_bytes - 1), launches=launches)


def _larger(program: Program) -> Program:
    return replace(program, storages=tuple(replace(s, size_bytes=4 * s.size_bytes) for s in program.storages))


@pytest.mark.parametrize(("launch_us", "told"), [(10.0, False), (5000.0, True)])
def test_a_step_that_the_cpu_bounds_says_what_helps(launch_us: float, told: bool) -> None:
    """Four matmuls of 1.5 ms, under which four launches take the CPU next to nothing, or 20 ms."""
    hardware = replace(H100, compute=replace(H100.compute, collective_launch_us=launch_us))
    plan = make_plan(chain(), hardware, LatestStart(), Budget.parse("unlimited"))
    assert any("bound by the CPU" in note for note in plan.notes) is told


def test_an_illegal_order_is_dropped_for_the_one_as_written(caplog) -> None:
    program = chain()
    wrong = (*program.order[:-3], program.order[-2], program.order[-3], program.order[-1])
    plan = make_plan(program, H100, Fixed(wrong), Budget.parse("unlimited"), launches=OFF)
    assert plan.schedule.order == program.order
    assert any("illegal" in note for note in plan.notes)
    assert any(record.levelname == "ERROR" for record in caplog.records), "loudly"


def test_an_order_over_the_budget_is_dropped() -> None:
    program = chain()
    plan = make_plan(program, H100, BackwardPre(depth=3), Budget.parse("1.0x"), launches=OFF)
    assert plan.memory_after.peak_bytes <= peak(program).peak_bytes
    assert any("over the budget" in note for note in plan.notes)


def test_a_slower_order_is_not_used() -> None:
    """As written the gather runs beside the first matmul; the order offered launches it behind, where nothing hides it."""
    build = Builder()
    x, shard = build.input("x", MIB, held=True), build.input("shard", 32 * MIB, held=True)
    first = build.compute("mm0", x, size_bytes=MIB, flops=10**12)
    launch = build.all_gather("ag", shard, 64 * MIB)
    second = build.compute("mm1", first, size_bytes=MIB, flops=10**12)
    third = build.compute("mm2", second, size_bytes=MIB, flops=10**12)
    program = build.output(build.compute("use", third, build.wait("w", launch), size_bytes=MIB, flops=10**9))
    serial = ("x", "shard", "mm0", "mm1", "mm2", "ag", "w", "use", "output")
    plan = make_plan(program, H100, Fixed(serial), Budget.parse("unlimited"), launches=OFF)
    assert plan.schedule.order == program.order
    assert any("order as written is kept" in note for note in plan.notes)


def test_as_written_changes_nothing() -> None:
    program = chain()
    plan = make_plan(program, H100, AsWritten(), Budget.parse(None))
    assert (plan.program, plan.coalesced, plan.schedule.order) == (program, (), program.order)
    assert plan.after.step_us == plan.before.step_us


def _gathered_too_early() -> Program:
    """Two gathers written at the start, before matmuls that need one after the other: less memory is one sink away."""
    build = Builder()
    value = build.input("x", MIB, held=True)
    shards = [build.input(f"shard{i}", 32 * MIB, held=True) for i in range(2)]
    weights = [build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 64 * MIB)) for i, shard in enumerate(shards)]
    for i, weight in enumerate(weights):
        value = build.compute(f"mm{i}", value, weight, size_bytes=MIB, flops=10**12)
    return build.output(value)


def test_as_written_moves_nothing_even_where_another_order_is_better() -> None:
    program = _gathered_too_early()
    for budget in ("fsdp2", "unlimited", "1.0x"):
        assert make_plan(program, H100, AsWritten(), Budget.parse(budget)).schedule.order == program.order


def test_as_written_gives_way_to_the_order_of_least_memory_where_only_that_fits() -> None:
    program = _gathered_too_early()
    budget_bytes = peak(program).peak_bytes - MIB
    plan = make_plan(program, H100, AsWritten(), Budget.parse(budget_bytes))
    assert plan.memory_after.peak_bytes <= budget_bytes


def test_a_program_without_collectives_is_planned_as_it_is() -> None:
    build = Builder()
    program = build.output(build.compute("mm", build.input("x", 8), size_bytes=8, flops=100))
    plan = make_plan(program, H100, LatestStart(), Budget.parse(None))
    assert plan.schedule.order == program.order


def test_a_plan_is_json_and_its_skeleton_tells_launch_orders_apart() -> None:
    program = chain()
    first = make_plan(program, H100, LatestStart(), Budget.parse(None))
    again = make_plan(program, H100, LatestStart(), Budget.parse(None))
    other = make_plan(chain(5), H100, LatestStart(), Budget.parse(None))
    assert json.loads(json.dumps(first.to_json())) == again.to_json()
    assert first.skeleton == again.skeleton != other.skeleton


def test_measured_times_replace_the_cost_model() -> None:
    """With gathers of a microsecond there is next to nothing to hide."""
    program = chain()
    fast = {op.name: 1.0 for op in program.launches}
    plan = make_plan(program, H100, LatestStart(), Budget.parse(None), measured=fast)
    assert plan.before.exposed_us == pytest.approx(4.0)


def test_the_cpu_runs_ahead_from_a_forward_into_its_backward_if_the_device_is_what_takes_longest() -> None:
    """The same chain as forward and backward: the time by which the device is late is what the CPU is early."""
    forward = chain()
    backward = replace(forward, name="backward", phase=Phase.BACKWARD)
    first = make_plan(forward, H100, LatestStart(), Budget.parse(None))
    budget = budget_within(Budget.parse(None), backward, [first])
    warm, cold = (make_plan(backward, H100, LatestStart(), given) for given in (budget, Budget.parse(None)))

    assert budget.cpu_ahead_us == first.cpu_ahead_us == first.after.step_us - first.after.cpu_us > 0
    assert warm.after.idle_us < cold.after.idle_us, "the first launches of the backward are there when it begins"
    assert warm.after.step_us >= warm.bound.step_us


def test_a_step_that_the_cpu_bounds_leaves_it_no_lead() -> None:
    """Ops of next to no work: the CPU issues the forward as long as it lasts, and the backward begins with it."""
    build = Builder("small", Phase.FORWARD)
    value = build.input("x", 8)
    for number in range(50):
        value = build.compute(f"mm{number}", value, size_bytes=8)
    forward = build.output(value)
    backward = replace(forward, name="backward", phase=Phase.BACKWARD)
    slow = replace(H100, compute=replace(H100.compute, kernel_launch_us=100.0))
    first = make_plan(forward, slow, LatestStart(), Budget.parse(None))
    second = make_plan(backward, slow, LatestStart(), budget_within(Budget.parse(None), backward, [first]))

    launches_us = 50 * slow.compute.kernel_launch_us
    assert first.cpu_ahead_us <= first.after.step_us - launches_us + 1e-6, "only the last kernel is left"
    assert first.after.step_us + second.after.step_us >= 2 * launches_us
