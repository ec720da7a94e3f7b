"""The legality check must be able to fail: a legal schedule is broken in every way that it looks for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import CollectiveKind, OpKind, OpNode, Program, Role
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder, fsdp_programs, random_order


def swapped(order: tuple[str, ...], first: str, second: str) -> tuple[str, ...]:
    """``order`` with ``second`` moved to just before ``first``."""
    rest = [name for name in order if name != second]
    rest.insert(rest.index(first), second)
    return tuple(rest)


@given(program=fsdp_programs(), seed=st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_an_order_that_the_dependency_graph_allows_is_legal(program, seed) -> None:
    assert violations(program, random_order(build_dag(program), random.Random(seed))) == ()


def legal(program: Program, order: tuple[str, ...]) -> bool:
    """By brute force, pair by pair: what conflicts stands as written."""
    at = {name: step for step, name in enumerate(order)}
    ops = program.ops
    pairs = ((one, other) for place, one in enumerate(ops) for other in ops[place + 1 :])
    return all(at[one.name] < at[other.name] for one, other in pairs if _conflict(program, one, other))


def _conflict(program: Program, one: OpNode, other: OpNode) -> bool:
    kinds = {one.kind, other.kind}
    if other.kind is OpKind.OUTPUT or kinds == {OpKind.INPUT} or one.name in (*other.inputs, other.launch):
        return True
    if (one.random and other.random) or (_batch(one) and _batch(other)):
        return True
    if program.launches_fixed and kinds == {OpKind.LAUNCH}:
        return True
    bound = [
        op.opaque or op.random or bool(op.writes) or op.kind in (OpKind.LAUNCH, OpKind.WAIT) for op in (one, other)
    ]
    if all(bound) and (one.opaque or other.opaque):
        return True
    if OpKind.INPUT in kinds:
        return False
    return bool(set(one.writes) & program.touched(other) or set(other.writes) & program.touched(one))


def _batch(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is Role.ACTIVATION


@given(program=fsdp_programs(), fixed=st.booleans(), data=st.data())
@settings(max_examples=300)
def test_a_corrupted_order_is_found_exactly_if_two_ops_that_conflict_have_changed_places(program, fixed, data) -> None:
    """One op of the order as written moved anywhere: of all ways to break an order, the least."""
    program = replace(program, launches_fixed=fixed)
    names = list(program.order)
    moved = names.pop(data.draw(st.integers(0, len(names) - 1)))
    names.insert(data.draw(st.integers(0, len(names))), moved)
    assert (violations(program, tuple(names)) == ()) is legal(program, tuple(names))


def test_a_write_carried_across_a_write_through_an_alias_is_found() -> None:
    build = Builder()
    a = build.compute("a", build.input("x", 4), size_bytes=4)
    build.in_place("doubled", build.view("v", a))
    build.in_place("raised", build.view("u", a))
    program = build.output(a)
    assert any("change places" in found for found in violations(program, swapped(program.order, "doubled", "raised")))


def test_opaque_ops_that_change_places_are_found() -> None:
    """Effect tokens order such ops in the graph; where there are none, their order as written counts."""
    build = Builder()
    x = build.input("x", 4)
    build.compute("log", x, opaque=True)
    build.compute("count", x, opaque=True)
    program = build.output(x)
    assert any("crosses an opaque op" in found for found in violations(program, swapped(program.order, "log", "count")))


def test_a_draw_that_crosses_an_opaque_op_is_found() -> None:
    build = Builder()
    x = build.input("x", 4)
    program = build.output(build.compute("reseed", x, opaque=True), build.compute("drop", x, random=True))
    assert any(
        "crosses an opaque op" in found for found in violations(program, swapped(program.order, "reseed", "drop"))
    )


def test_a_reader_before_the_wait_is_found() -> None:
    build = Builder()
    weight = build.wait("w", build.all_gather("ag", build.input("shard", 4), 8))
    program = build.output(build.compute("mm", weight))
    assert any(
        "mm reads w before it exists" in found for found in violations(program, swapped(program.order, "w", "mm"))
    )


@pytest.mark.parametrize("part", [False, True])
def test_a_result_that_is_read_or_leaves_without_a_wait_is_found(part: bool) -> None:
    """Also a part of a coalesced launch's."""
    build = Builder()
    result = build.all_gather("ag", build.input("shard", 4), 8)
    if part:
        result = build.view("part", result)
    program = build.output(result)
    ops = tuple(replace(op, target="getitem") if op.name == "part" else op for op in program.ops)
    assert violations(replace(program, ops=ops), program.order) == (f"output reads {result} without a wait",)


def test_an_op_that_is_not_of_the_program_is_found() -> None:
    build = Builder()
    program = build.output(build.compute("a", build.input("x", 4)))
    assert "foreign" in violations(program, ("x", "stranger", "a", "output"))[0]


def test_a_lost_op_is_found() -> None:
    build = Builder()
    program = build.output(build.compute("a", build.input("x", 4)))
    assert "ops lost: a" in violations(program, ("x", "output"))[0]


def test_an_op_that_stands_twice_is_found() -> None:
    build = Builder()
    program = build.output(build.compute("a", build.input("x", 4)))
    assert violations(program, ("x", "a", "a", "output"))


def test_a_reader_before_its_value_is_found() -> None:
    build = Builder()
    a = build.compute("a", build.input("x", 4))
    program = build.output(build.compute("b", a))
    assert "b reads a before it exists" in violations(program, swapped(program.order, "a", "b"))


def test_a_read_carried_across_a_write_through_a_view_is_found() -> None:
    """v is another name of a; ``changed`` overwrites a; the reader of v must stay before it."""
    build = Builder()
    a = build.compute("a", build.input("x", 4), size_bytes=4)
    view = build.view("v", a)
    reader = build.compute("reader", view, size_bytes=4)
    build.in_place("changed", a)
    program = build.output(reader)
    assert any("change places" in found for found in violations(program, swapped(program.order, "reader", "changed")))


def test_a_write_into_the_input_of_a_running_collective_is_found() -> None:
    """launch reads a until its wait: the in-place op stands behind the wait and must not slip between them."""
    build = Builder()
    a = build.compute("a", build.input("x", 4), size_bytes=4)
    launch = build.reduce_scatter("rs", a, 2)
    wait = build.wait("w", launch)
    build.in_place("changed", a)
    program = build.output(wait)
    assert any("change places" in found for found in violations(program, swapped(program.order, "w", "changed")))


def test_random_draws_that_change_places_are_found() -> None:
    build = Builder()
    x = build.input("x", 4)
    first, second = build.compute("first", x, random=True), build.compute("second", x, random=True)
    program = build.output(first, second)
    assert any("random draws" in found for found in violations(program, swapped(program.order, "first", "second")))


def test_a_collective_that_crosses_an_opaque_op_is_found() -> None:
    build = Builder()
    x, shard = build.input("x", 4), build.input("shard", 4)
    opaque = build.compute("custom", x, opaque=True)
    weight = build.wait("w", build.all_gather("ag", shard, 8))
    program = build.output(build.compute("mm", opaque, weight))
    assert any("crosses an opaque op" in found for found in violations(program, swapped(program.order, "custom", "ag")))


def test_activation_collectives_that_change_places_are_found() -> None:
    build = Builder()
    x = build.input("x", 4)
    a, b = build.compute("a", x, size_bytes=4), build.compute("b", x, size_bytes=4)
    first = build.launch("first", a, CollectiveKind.ALL_REDUCE, Role.ACTIVATION, size_bytes=4, group="g0")
    second = build.launch("second", b, CollectiveKind.ALL_TO_ALL, Role.ACTIVATION, size_bytes=4, group="g1")
    program = build.output(build.wait("w1", first), build.wait("w2", second))
    broken = swapped(program.order, "first", "second")
    assert any("activation collectives" in found for found in violations(program, broken))


def test_a_wait_before_its_launch_is_found() -> None:
    build = Builder()
    program = build.output(build.wait("w", build.all_gather("ag", build.input("shard", 4), 8)))
    assert any("waits for ag" in found for found in violations(program, swapped(program.order, "ag", "w")))


def test_inputs_that_change_places_are_found() -> None:
    """A graph's inputs are its arguments: their order is its calling convention."""
    build = Builder()
    program = build.output(build.compute("a", build.input("x", 4), build.input("y", 4)))
    assert any("inputs change places" in found for found in violations(program, swapped(program.order, "x", "y")))
