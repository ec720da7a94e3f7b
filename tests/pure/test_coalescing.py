"""Coalesced launches: what joins, what the program looks like behind it, and that it stays the same computation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpKind, Phase, Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.coalescing import Group, apart, coalesce, groups_of
from overlap_pass.schedule.variants import variants
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, fsdp_programs, prices


def one_block(sizes: tuple[int, ...] = (10, 20, 30)) -> Program:
    """Three gathers of one unit, each with a cast before it and a reader of its own."""
    build = Builder()
    value = build.input("x", 8, held=True)
    shards = [build.input(f"shard{i}", size // 2, held=True) for i, size in enumerate(sizes)]
    for i, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        cast = build.cast(f"cast{i}", shard, size // 2)
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", cast, size, unit="block"))
        value = build.compute(f"mm{i}", value, weight, size_bytes=8)
    return build.output(value)


def test_neighbours_join_until_a_launch_carries_the_target() -> None:
    assert groups_of(one_block(), 60) == (Group(("ag0", "ag1", "ag2")),)
    assert groups_of(one_block(), 30) == (Group(("ag0", "ag1")),), "10 + 20 reach 30; the third is left alone"
    assert groups_of(one_block(), 10) == (), "each carries enough by itself"


def test_gathers_of_different_units_stay_apart() -> None:
    build = Builder()
    value = build.input("x", 8, held=True)
    shards = [build.input(f"shard{i}", 5, held=True) for i in range(2)]
    for i, shard in enumerate(shards):
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 10, unit=f"block{i}"))
        value = build.compute(f"mm{i}", value, weight, size_bytes=8)
    assert groups_of(build.output(value), 100) == ()


def test_collectives_without_a_unit_are_left_alone() -> None:
    build = Builder()
    shards = [build.input(f"shard{i}", 5, held=True) for i in range(2)]
    waits = [build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 10)) for i, shard in enumerate(shards)]
    assert groups_of(build.output(build.compute("mm", *waits)), 100) == ()


def test_a_coalesced_gather_stands_where_its_first_member_stood_behind_all_casts() -> None:
    program = one_block()
    joined = coalesce(program, groups_of(program, 60))
    order = joined.order
    assert order.index("ag0_coalesced") < order.index("mm0")
    assert all(order.index(f"cast{i}") < order.index("ag0_coalesced") for i in range(3))
    launch = joined.op("ag0_coalesced")
    assert launch.inputs == ("cast0", "cast1", "cast2")
    assert launch.collective is not None
    assert launch.collective.payload_bytes == 60
    assert [joined.op(f"w{i}").inputs for i in range(3)] == [("ag0_part",), ("ag1_part",), ("ag2_part",)]
    assert {joined.op(f"w{i}").launch for i in range(3)} == {"ag0_coalesced"}


def test_coalesced_gradients_are_reduced_when_the_last_of_them_exists() -> None:
    build = Builder(phase=Phase.BACKWARD)
    x = build.input("x", 8, held=True)
    waits = []
    for i in range(2):
        gradient = build.compute(f"mm{i}", x, size_bytes=10)
        waits.append(build.wait(f"w{i}", build.reduce_scatter(f"rs{i}", gradient, 5)))
    program = build.output(*waits)
    joined = coalesce(program, (Group(("rs0", "rs1")),))
    assert joined.order.index("mm1") < joined.order.index("rs0_coalesced") < joined.order.index("w0")
    assert violations(joined, joined.order) == ()


def test_all_members_hold_memory_from_the_coalesced_launch_on() -> None:
    """As written each gathered parameter (10, 20, 30) is alone; coalesced all 60 live at once, and so do the casts."""
    program = one_block()
    joined = coalesce(program, groups_of(program, 60))
    alone, together = peak(program), peak(joined)
    assert together.peak_bytes - alone.peak_bytes >= 60 - 30


def test_one_latency_is_paid_instead_of_three() -> None:
    program = one_block()
    joined = coalesce(program, groups_of(program, 60))
    apart = simulate(program, prices(program, {f"ag{i}": 5.0 for i in range(3)}))
    once = simulate(joined, prices(joined, {"ag0_coalesced": 5.0}))
    assert (apart.step_us, once.step_us) == (15.0, 5.0)


@given(program=fsdp_programs(), target_bytes=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_a_coalesced_program_is_legal_and_computes_with_the_same_ops(program, target_bytes) -> None:
    groups = groups_of(program, target_bytes)
    joined = coalesce(program, groups)
    assert violations(joined, joined.order) == ()
    build_dag(joined)
    computes = [op for op in program.ops if op.kind is OpKind.COMPUTE]
    assert {op.name: op for op in joined.ops if op.kind is OpKind.COMPUTE} == {op.name: op for op in computes}
    assert sum(len(launch.inputs) for launch in joined.launches) == len(program.launches)
    assert {s.id: s.size_bytes for s in joined.storages} == {s.id: s.size_bytes for s in program.storages}


@pytest.mark.parametrize("target_bytes", [1, 60])
def test_grouping_is_the_same_every_time(target_bytes) -> None:
    assert groups_of(one_block(), target_bytes) == groups_of(one_block(), target_bytes)


@pytest.mark.parametrize("across", [False, True])
def test_nothing_is_joined_across_an_opaque_op(across: bool) -> None:
    build = Builder()
    value = build.input("x", 8, held=True)
    for i in range(2):
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", build.input(f"shard{i}", 5), 10, unit="block"))
        value = build.compute(f"mm{i}", value, weight, size_bytes=8)
        value = build.compute(f"log{i}", value, size_bytes=8, opaque=True)
    program = build.output(value)
    assert groups_of(program, 100, across=across) == ()
    assert violations(program, apart(coalesce(program, [Group(("ag0", "ag1"))]).order, [Group(("ag0", "ag1"))]))


def test_what_would_move_a_write_by_being_joined_is_not_offered() -> None:
    """The second gather sends what was overwritten before; the first must not wait for it, nor take it along."""
    build = Builder()
    value, buffer = build.input("x", 8, held=True), build.compute("buffer", build.input("y", 5), size_bytes=5)
    first = build.wait("w0", build.all_gather("ag0", build.input("shard", 5), 10, unit="block"))
    value = build.compute("mm0", value, first, size_bytes=8)
    build.in_place("changed", buffer, value)
    second = build.wait("w1", build.all_gather("ag1", buffer, 10, unit="block"))
    program = build.output(build.compute("mm1", value, second, size_bytes=8))
    joined = variants(program, lambda p: prices(p, {}), 100)[1:]
    for variant in joined:
        assert violations(program, apart(variant.problem.program.order, variant.groups)) == ()


@given(program=fsdp_programs(), target=st.integers(1, 40), across=st.booleans())
@settings(max_examples=100)
def test_every_variant_is_a_legal_order_of_the_program_as_it_came(program, target, across) -> None:
    for variant in variants(program, lambda p: prices(p, {}), target, across_units=across):
        assert violations(program, apart(variant.problem.program.order, variant.groups)) == ()
