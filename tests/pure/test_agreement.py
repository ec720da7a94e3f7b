"""Ranks whose graphs differ in compute alone launch in one order: shown on programs whose sizes and ops are shaken."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.graph.program import Category, OpKind, OpNode, Program, Role
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.ledger import peak
from overlap_pass.planning import Plan, make_plan
from overlap_pass.registry import parse
from overlap_pass.schedule.agreement import added_bytes, agreed
from overlap_pass.schedule.alike import Terms, choose_alike
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.variants import Variant
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder, fsdp_programs
from tests.pure.test_strategies_promises import SPECS, large

H100 = load_hardware("h100")
MIB = 2**20
RANK_INDEPENDENT = ("unlimited", "fsdp2", "+0B", "+3MiB", "fsdp2+8MiB")


def on_another_rank(program: Program, seed: int) -> Program:
    """The same collectives; activations of other sizes, other work, more ops in between, other names of ops."""
    draws = random.Random(seed)
    factor = draws.choice((0.1, 0.5, 0.9, 1.1, 3.0, 40.0))
    travels = _travelling(program)
    storages = tuple(
        s if s.id in travels or s.held else replace(s, size_bytes=int(s.size_bytes * factor)) for s in program.storages
    )
    ops: list[OpNode] = []
    for op in program.ops:
        if op.collective and op.collective.role is Role.ACTIVATION:  # carries the batch
            payload_bytes = int(op.collective.payload_bytes * factor)
            op = replace(op, collective=replace(op.collective, payload_bytes=payload_bytes))
        if op.kind is OpKind.COMPUTE and not op.collective:
            op = replace(op, flops=int((op.flops or 0) * factor), read_bytes=int(op.read_bytes * factor))
        ops.append(op)
        pads = op.kind is OpKind.COMPUTE and not op.moves_data and not travels.intersection(op.storages)
        if pads and draws.random() < 0.4:  # of the batch: of parameters and gradients all ranks do the same
            pad = OpNode(f"pad_{len(ops)}", OpKind.COMPUTE, "test.pad", (op.name,), category=Category.REDUCTION)
            ops.append(pad)
    return _renamed(replace(program, ops=tuple(ops), storages=storages))


SHARES = st.sampled_from((0.0, 2.0 / 2**28, 9.0 / 2**28, 15.0 / 2**28, 1.0))
"""The allowance is 256 MiB, which programs of a few bytes never use up: so very small shares of it, too."""


def _travelling(program: Program) -> set[int]:
    """Storages of what is sent and received, before and after casts: as large on every rank."""
    launches = [op for op in program.launches if op.collective.role is not Role.ACTIVATION]
    found = {storage for op in launches for storage in op.storages}
    names = {name for op in launches for name in op.inputs}
    for op in reversed(program.ops):
        if op.name in names and op.moves_data:
            names.update(op.inputs)
    found |= {storage for name in names for storage in program.op(name).storages}
    for op in program.ops:
        if op.moves_data and found.intersection(*[program.op(name).storages for name in op.inputs]):
            found.update(op.storages)
    return found


def _renamed(program: Program) -> Program:
    """Compute ops named for another symbol."""
    new = {op.name: f"s9_{op.name}" for op in program.ops if op.kind is OpKind.COMPUTE}
    ops = tuple(
        replace(op, name=new.get(op.name, op.name), inputs=tuple(new.get(n, n) for n in op.inputs))
        for op in program.ops
    )
    owners = tuple(replace(s, owner=new.get(s.owner, s.owner)) for s in program.storages)
    return replace(program, ops=ops, storages=owners)


def launches(plan: Plan) -> tuple[list[str], str]:
    ordered = [name for name in plan.schedule.order if plan.program.op(name).kind is OpKind.LAUNCH]
    return ordered, plan.skeleton


@pytest.mark.parametrize("strategy", [text for text in SPECS if text != "exact"])
@given(data=st.data())
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
def test_ranks_that_differ_in_compute_launch_in_one_order(strategy: str, data) -> None:
    program = large(data.draw(fsdp_programs()))
    budget = Budget.parse(data.draw(st.sampled_from(RANK_INDEPENDENT)))
    coalesce = data.draw(st.sampled_from(("auto", "off", 8 * MIB)))
    rules = Launches(coalesce, "agreed")
    plans = [make_plan(p, H100, parse(strategy), budget, launches=rules)
             for p in (program, on_another_rank(program, data.draw(st.integers(0, 10**6))))]  # fmt: skip
    assert launches(plans[0]) == launches(plans[1])


def test_by_price_alone_they_would_not() -> None:
    """Else the test above would show nothing: two batches, one of which leaves no time to hide a gather behind compute."""
    small, large_ = (layers(flops) for flops in (10**7, 10**13))
    priced = [launches(make_plan(p, H100, parse("latest_start"), Budget.parse("fsdp2"), launches=Launches("auto", "priced")))
              for p in (small, large_)]  # fmt: skip
    shared = [launches(make_plan(p, H100, parse("latest_start"), Budget.parse("fsdp2"))) for p in (small, large_)]
    assert priced[0] != priced[1]
    assert shared[0] == shared[1]


@pytest.mark.parametrize("flops", [10**11, 5 * 10**11, 10**12])
def test_over_a_slow_link_what_is_joined_knows_that_a_collective_starts_between_kernels(flops: int) -> None:
    """Else ways of joining look alike and the plan is far from the one that a rank would make by itself: 31 ms for 20.

    The prices are those at which that was seen; at others, ways of joining so near to each other change places.
    """
    machine, program = load_hardware("h200-host-staged"), layers(flops)
    link = replace(machine.intra_node, bandwidth_gb_per_s=24.7)
    machine = replace(machine, intra_node=link, contention=Contention(1.03, 1.03, 2.0))
    alike, apart, alone = (
        make_plan(program, machine, parse("latest_start"), Budget.parse("fsdp2"), launches=rules).after.step_us
        for rules in (Launches("auto", "agreed"), Launches("off", "agreed"), Launches("auto", "priced"))
    )
    assert alike <= apart
    assert alike <= 1.05 * alone


def layers(flops: int, count: int = 6) -> Program:
    """A backward: each layer gathers 2 × 32 MiB, computes, and reduces two gradients."""
    build = Builder()
    value = build.input("x", MIB)
    returned = []
    for layer in range(count):
        for part in range(2):
            tag = f"{layer}_{part}"
            shard = build.input(f"shard{tag}", 16 * MIB, held=True)
            weight = build.wait(f"w{tag}", build.all_gather(f"ag{tag}", shard, 32 * MIB, unit=f"layers.{layer}"))
            gradient = build.compute(f"dw{tag}", value, size_bytes=32 * MIB, flops=flops)
            value = build.compute(f"dx{tag}", value, weight, size_bytes=MIB, flops=flops)
            returned.append(build.wait(f"rw{tag}", build.reduce_scatter(f"rs{tag}", gradient, 16 * MIB)))
    return build.output(value, *returned)


@given(program=fsdp_programs(), share=SHARES, other=st.integers(0, 10**6), as_written=st.booleans())
@settings(max_examples=80)
def test_what_an_agreed_order_adds_bounds_its_peak_and_is_the_same_on_every_rank(
    program, share, other, as_written
) -> None:
    found = agreed(program, share, as_written=as_written)
    added = added_bytes(program, found)
    assert peak(found).peak_bytes <= peak(program).peak_bytes + added
    assert violations(program, found.order) == ()
    there = on_another_rank(program, other)
    assert added_bytes(there, agreed(there, share, as_written=as_written)) == added


def test_a_reduction_that_was_written_late_may_stay_there() -> None:
    """Reduced as soon as the gradient exists, a sum larger than it is held while a weight is read."""
    build = Builder()
    x, shard = build.input("x", MIB), build.input("shard", 8 * MIB, held=True)
    gradient = build.compute("gradient", x, size_bytes=32 * MIB)
    weight = build.wait("weight", build.all_gather("gather", shard, 16 * MIB))
    value = build.compute("read", x, weight, size_bytes=MIB)
    reduction = build.reduce_scatter("reduce", build.cast("wide", gradient, 64 * MIB), 48 * MIB)
    program = build.output(value, build.wait("reduced", reduction))
    assert added_bytes(program, agreed(program, as_written=True)) == 0
    assert added_bytes(program, agreed(program)) > 0


def test_an_allowance_lets_gathers_ahead_of_other_launches() -> None:
    """Layers gather two weights of 32 MiB and reduce twice; the allowance is 256 MiB, of which a quarter is two gathers."""
    program = layers(10**12, count=2)
    kinds = {mib: [op.name for op in agreed(program, mib / 256).launches] for mib in (0, 32, 64)}
    assert kinds[0] == ["rs0_0", "ag0_0", "rs0_1", "ag0_1", "rs1_0", "ag1_0", "rs1_1", "ag1_1"]
    assert kinds[32] == ["ag0_0", "rs0_0", "ag0_1", "rs0_1", "ag1_0", "rs1_0", "ag1_1", "rs1_1"]
    assert kinds[64] == ["ag0_0", "ag0_1", "rs0_0", "ag1_0", "rs0_1", "ag1_1", "rs1_0", "rs1_1"]


@given(program=fsdp_programs(), extra=st.integers(0, 40))
@settings(max_examples=60)
def test_every_budget_that_the_order_as_written_keeps_is_kept(program, extra) -> None:
    budget_bytes = max(peak(program).peak_bytes + extra, 1)
    plan = make_plan(program, H100, parse("latest_start"), Budget.parse(budget_bytes))
    assert plan.memory_after.peak_bytes <= budget_bytes


@given(
    program=fsdp_programs(max_layers=6).map(large),
    extra=st.lists(st.integers(0, 40), min_size=2, max_size=3).map(sorted),
)
@settings(max_examples=60)
def test_more_budget_never_makes_a_longer_step_while_launches_keep_their_order(program, extra) -> None:
    """Another order of launches may be longer here: it is chosen without this rank's prices."""
    least_us: dict[str, float] = {}
    for budget in (*(f"+{more}MiB" for more in extra), "unlimited"):
        plan = make_plan(program, H100, parse("latest_start"), Budget.parse(budget))
        assert plan.after.step_us <= least_us.get(plan.skeleton, plan.after.step_us)
        least_us[plan.skeleton] = plan.after.step_us


@given(program=fsdp_programs(max_layers=8).map(large))
@settings(max_examples=60, derandomize=True)
def test_another_order_of_launches_is_taken_where_it_is_worth_it_on_this_rank_too(program) -> None:
    """No promise, as no rank's price decides; but on all of these graphs more budget is no longer step."""
    budgets = ("+0B", "+5MiB", "+10MiB", "+20MiB", "+30MiB", "+40MiB", "+80MiB", "unlimited")
    steps_us = [make_plan(program, H100, parse("latest_start"), Budget.parse(b)).after.step_us for b in budgets]
    assert steps_us == sorted(steps_us, reverse=True)


def test_launches_that_stay_in_order_leave_the_order_as_written_as_it_is() -> None:
    """Of another order with the same launches, the casts behind reductions would stand at the end."""
    build = Builder()
    shards = [build.input(f"shard{layer}", 4 * MIB, held=True) for layer in range(2)]
    value, returned = build.input("x", MIB), []
    for layer, shard in enumerate(shards):
        weight = build.wait(f"weight{layer}", build.all_gather(f"gather{layer}", shard, 8 * MIB))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=MIB)
        gradient = build.compute(f"grad{layer}", value, size_bytes=8 * MIB)
        reduced = build.wait(f"reduced{layer}", build.reduce_scatter(f"reduce{layer}", gradient, 4 * MIB))
        returned.append(build.cast(f"cast{layer}", reduced, 8 * MIB))
    program = build.output(value, *returned)
    priced = partial(price, hardware=H100)
    terms = Terms(parse("as_written"), Budget.parse("+0B"), peak(program).peak_bytes)
    chosen = choose_alike([Variant.of((), program, priced)], terms, priced)
    assert chosen.schedule.order == program.order


def test_an_order_that_local_memory_forces_says_so() -> None:
    program = layers(10**12)
    plan = make_plan(program, H100, parse("latest_start"), Budget.parse(peak(program).peak_bytes))
    assert any("shared by ranks whose graphs have the same sizes" in note for note in plan.notes)
    assert not any(
        "same sizes" in note for note in make_plan(program, H100, parse("latest_start"), Budget.parse(None)).notes
    )


def test_a_schedule_that_leaves_the_shared_order_is_caught() -> None:
    program = agreed(layers(10**12))
    first, second = (op.name for op in program.launches[:2])
    order = [name for name in (op.name for op in program.ops) if name != second]
    order.insert(order.index(first), second)
    assert any("order of all ranks" in found for found in violations(program, tuple(order)))


def test_moves_are_told_against_the_order_as_written() -> None:
    """A gather that the agreed order already puts ahead has moved all the same."""
    program = layers(10**12)
    plan = make_plan(program, H100, parse("latest_start"), Budget.parse("fsdp2"), launches=Launches("off"))
    assert plan.program.order == program.order
    moved = {decision.op: decision.moved_over for decision in plan.schedule.decisions}
    assert moved["ag1_0"] > 0
