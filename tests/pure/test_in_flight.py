"""A limit on communicators in flight, and activation collectives let loose: options that change orders and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import CollectiveKind, OpKind, Program, Role
from overlap_pass.memory.budget import Budget
from overlap_pass.planning import Plan, make_plan
from overlap_pass.registry import parse
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder, fsdp_programs
from tests.pure.test_agreement import launches, on_another_rank
from tests.pure.test_strategies_promises import SPECS, large

_H100 = load_hardware("h100")
H100 = replace(_H100, compute=replace(_H100.compute, kernel_launch_us=0.0, collective_launch_us=0.0))
"""With a CPU that is never late: programs of a few ops would only wait for it."""
MIB = 2**20


def planned(program: Program, rules: Launches, strategy: str = "greedy") -> Plan:
    return make_plan(program, H100, parse(strategy), Budget.parse("unlimited"), launches=rules)


def most_in_flight(program: Program, order: tuple[str, ...]) -> int:
    """Communicators that have launches without a wait behind them, at the worst moment."""
    at = {name: step for step, name in enumerate(order)}
    spans = [
        (op.collective.group, at[op.name], max(at[wait] for wait in program.waits_of[op.name]))
        for op in program.launches
    ]
    return max((len({g for g, first, last in spans if first <= step < last}) for step in range(len(order))), default=0)


@pytest.mark.parametrize("strategy", SPECS)
@given(data=st.data())
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])
def test_no_order_has_more_communicators_in_flight_than_the_limit(strategy: str, data) -> None:
    groups = data.draw(st.sampled_from((("g0", "g1"), ("g0", "g1", "g2"))))
    program = large(data.draw(fsdp_programs(groups=groups)))
    limit = data.draw(st.integers(1, 2))
    rules = Launches(data.draw(st.sampled_from(("auto", "off", 8 * MIB))), most_in_flight=limit)
    plan = planned(program, rules, strategy)
    assert most_in_flight(plan.program, plan.schedule.order) <= limit
    assert violations(plan.program, plan.schedule.order) == ()
    assert not any("illegal" in note for note in plan.notes)
    there = planned(on_another_rank(program, data.draw(st.integers(0, 10**6))), rules, strategy)
    assert launches(there) == launches(plan), "and all ranks launch alike, as ever"


def two_communicators() -> Program:
    """Three layers, each of two weights that are gathered over two communicators."""
    build = Builder()
    value = build.input("x", MIB)
    for layer in range(3):
        for group in ("g0", "g1"):
            shard = build.input(f"shard_{layer}_{group}", 16 * MIB, held=True)
            gather = build.all_gather(f"gather_{layer}_{group}", shard, 32 * MIB, group=group, unit=f"{layer}.{group}")
            value = build.compute(f"mm_{layer}_{group}", value, build.wait(f"w_{layer}_{group}", gather), size_bytes=MIB,
                                  flops=10**11)  # fmt: skip
    return build.output(value)


@pytest.mark.parametrize("strategy", ["greedy", "latest_start", "backward_pre{depth=2}"])
def test_the_limit_has_an_effect_and_costs_what_it_must(strategy: str) -> None:
    free, one = (planned(two_communicators(), Launches("off", most_in_flight=n), strategy) for n in (None, 1))
    assert most_in_flight(free.program, free.schedule.order) == 2
    assert most_in_flight(one.program, one.schedule.order) == 1
    assert free.after.step_us < one.after.step_us


def test_the_order_as_written_keeps_the_limit_by_waits_alone() -> None:
    """a and b, on two communicators, are launched before either is waited for."""
    build = Builder()
    first, second = (build.input(name, 4, held=True) for name in ("first", "second"))
    a = build.all_gather("a", first, 8, group="g0")
    b = build.all_gather("b", second, 8, group="g1")
    build.compute("mm", build.wait("wait_a", a), build.wait("wait_b", b))
    program = build.output("mm")
    plan = planned(program, Launches(most_in_flight=1), "as_written")
    assert plan.schedule.order == ("first", "second", "a", "wait_a", "b", "wait_b", "mm", "output")


def test_a_schedule_above_the_limit_is_caught() -> None:
    program = replace(two_communicators(), most_in_flight=1)
    order = [name for name in program.order if name != "gather_0_g1"]
    order.insert(order.index("w_0_g0"), "gather_0_g1")
    assert violations(program, program.order) == ()
    assert "gather_0_g1 puts g0, g1 in flight at once, more than 1" in violations(program, tuple(order))


def test_a_limit_that_an_opaque_op_stands_in_the_way_of_is_refused() -> None:
    """Both are launched before an op that neither wait may cross."""
    build = Builder()
    x, first, second = (build.input(name, 4) for name in ("x", "first", "second"))
    a, b = build.all_gather("a", first, 8, group="g0"), build.all_gather("b", second, 8, group="g1")
    build.compute("custom", x, opaque=True)
    build.compute("mm", "custom", build.wait("wait_a", a), build.wait("wait_b", b))
    program = build.output("mm")
    with pytest.raises(PlanError, match=r"communicators_in_flight=1: .* across an operator"):
        planned(program, Launches(most_in_flight=1))
    assert planned(program, Launches(most_in_flight=2)).schedule.order


def two_branches() -> Program:
    """Two chains that meet at the end: one is exchanged twice, the other once over another communicator.

    As written the second exchange of the first chain comes before that of the second one. Nothing but the rule that
    activation collectives keep their order makes the second chain wait for it.
    """
    build = Builder()
    x = build.input("x", 64 * MIB)
    value = build.compute("a0", x, size_bytes=64 * MIB, flops=10**11)
    for step in range(2):
        sent = build.launch(f"send_{step}", value, CollectiveKind.ALL_TO_ALL, Role.ACTIVATION, size_bytes=64 * MIB)
        value = build.compute(f"a{step + 1}", build.wait(f"sent_{step}", sent), size_bytes=64 * MIB, flops=10**11)
    other = build.compute("b0", x, size_bytes=64 * MIB, flops=2 * 10**11)
    summed = build.launch("sum", other, CollectiveKind.ALL_REDUCE, Role.ACTIVATION, size_bytes=64 * MIB, group="g1")
    other = build.compute("b1", build.wait("summed", summed), size_bytes=64 * MIB, flops=2 * 10**11)
    return build.output(build.compute("joined", value, other, size_bytes=64 * MIB))


def activations(plan: Plan) -> list[str]:
    return [name for name in plan.schedule.order if plan.program.op(name).kind is OpKind.LAUNCH]


def test_activation_collectives_change_places_only_if_they_are_let_loose_and_then_the_step_is_shorter() -> None:
    kept, free = (planned(two_branches(), Launches("off", order), "fill_gaps") for order in ("priced", "free"))
    assert activations(kept) == ["send_0", "send_1", "sum"]
    assert activations(free) == ["send_0", "sum", "send_1"]
    assert free.after.step_us < kept.after.step_us
    assert violations(free.program, free.schedule.order) == ()


@pytest.mark.parametrize("strategy", SPECS)
@given(program=fsdp_programs())
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
def test_orders_that_are_free_are_legal_too(strategy: str, program: Program) -> None:
    plan = planned(large(program), Launches(order="free"), strategy)
    assert not any("illegal" in note for note in plan.notes)
    assert plan.after.step_us <= plan.before.step_us
