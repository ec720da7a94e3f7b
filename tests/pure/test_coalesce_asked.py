"""A size of joined launches that was asked for is kept where it fits, and never dropped in silence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import Program
from overlap_pass.memory.budget import Budget
from overlap_pass.planning import Plan, make_plan
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.strategies import AsWritten, LatestStart
from tests.pure.programs import Builder, fsdp_programs

MIB = 2**20
H100 = load_hardware("h100")
ORDERS = pytest.mark.parametrize("order", ["agreed", "priced"])


def one_unit(parameters: int = 2) -> Program:
    """Each gather but the first hides under the matmul (1.5 ms) before it; joined, all of them are waited for at the start."""
    build = Builder()
    value = build.input("x", MIB, held=True)
    shards = [build.input(f"shard{i}", 32 * MIB, held=True) for i in range(parameters)]
    for i, shard in enumerate(shards):
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 64 * MIB, unit="block"))
        value = build.compute(f"mm{i}", value, weight, size_bytes=MIB, flops=10**12)
    return build.output(value)


def planned(program: Program, coalesce: int | str, order: str, budget: str = "unlimited") -> Plan:
    return make_plan(program, H100, LatestStart(), Budget.parse(budget), launches=Launches(coalesce, order))


def notes(plan: Plan, word: str) -> list[str]:
    return [note for note in plan.notes if word in note]


@ORDERS
def test_a_size_is_kept_where_the_planner_would_join_less(order: str) -> None:
    """All of the unit at once is more than it would ever try, and longer by most of what the first matmuls could hide."""
    program = one_unit(8)
    auto, asked = planned(program, "auto", order), planned(program, 512 * MIB, order)
    assert [len(group.members) for group in asked.coalesced] == [8]
    assert all(len(group.members) < 8 for group in auto.coalesced)
    assert asked.after.step_us > auto.after.step_us


@ORDERS
def test_a_size_that_makes_the_step_longer_than_as_written_says_so(order: str) -> None:
    """As written the second gather is launched early, and waits only for the first."""
    build = Builder()
    x, *shards = (build.input(name, 32 * MIB, held=True) for name in ("x", "shard0", "shard1"))
    launches = [build.all_gather(f"ag{i}", shard, 64 * MIB, unit="block") for i, shard in enumerate(shards)]
    value = build.compute("mm0", x, build.wait("w0", launches[0]), size_bytes=MIB, flops=10**12)
    program = build.output(build.compute("mm1", value, build.wait("w1", launches[1]), size_bytes=MIB, flops=10**12))
    plan = planned(program, 128 * MIB, order)
    assert plan.coalesced
    assert plan.after.step_us > plan.before.step_us
    assert notes(plan, "joined to the size that coalesce asks for")


@ORDERS
@pytest.mark.parametrize("budget", ["1.0x", "+1MiB"])
def test_a_budget_comes_before_a_size_and_a_note_says_so(order: str, budget: str) -> None:
    """As written one gathered parameter of 64 MiB is alive at a time; joined, both are."""
    plan = planned(one_unit(), 128 * MIB, order, budget)
    assert plan.coalesced == ()
    assert plan.budget_bytes is not None
    assert plan.memory_after.peak_bytes <= plan.budget_bytes
    assert notes(plan, "coalesce=128 MiB is not kept")
    assert not notes(planned(one_unit(), "auto", order, budget), "coalesce")


@ORDERS
def test_a_size_with_nothing_to_join_says_so(order: str) -> None:
    assert notes(planned(one_unit(), 32 * MIB, order), "coalesce=32.0 MiB joins nothing")
    assert not notes(planned(one_unit(1), 128 * MIB, order), "coalesce"), "one launch has no neighbour to be missed"


def test_the_order_as_written_is_not_joined_and_says_so() -> None:
    launches = Launches(128 * MIB, "agreed")
    plan = make_plan(one_unit(), H100, AsWritten(), Budget.parse("unlimited"), launches=launches)
    assert (plan.coalesced, plan.schedule.order) == ((), one_unit().order)
    assert notes(plan, "coalesce=128 MiB joins nothing")


@ORDERS
@given(program=fsdp_programs(), size=st.integers(1, 40), budget=st.sampled_from(("1.0x", "fsdp2", "unlimited")))
@settings(max_examples=25)
def test_a_size_is_kept_or_a_note_says_why_not(order: str, program: Program, size: int, budget: str) -> None:
    plan = planned(program, size, order, budget)
    assert plan.coalesced or len(program.launches) < 2 or notes(plan, "coalesce=")
    assert plan.budget_bytes is None or plan.memory_after.peak_bytes <= plan.budget_bytes
    if plan.after.step_us > plan.before.step_us:
        assert notes(plan, "the order as written at")
