"""Memory of an order: hand-made cases for each rule, and a naive recount of random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.compute import clusters
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Category, CollectiveKind, OpKind, OpNode, Phase, Program, Role, Storage
from overlap_pass.memory.ledger import Ledger, Lifetimes, compiled_peak, peak
from tests.pure.programs import Builder, fsdp_programs, random_order


def test_an_output_is_allocated_before_its_dying_input_is_freed() -> None:
    """((x + 1) * 2).sum() with x held: two buffers at a time, never three, never one."""
    build = Builder()
    x = build.input("x", 100, held=True)
    plus = build.compute("plus", x, size_bytes=100)
    times = build.compute("times", plus, size_bytes=100)
    program = build.output(build.compute("total", times, size_bytes=4))

    profile = peak(program)

    assert profile.base_bytes == 100
    assert profile.live_bytes == (100, 200, 300, 204, 104)
    assert (profile.peak_bytes, profile.peak_op) == (300, "times")


def test_an_input_that_is_not_held_dies_after_its_last_reader() -> None:
    build = Builder(phase=Phase.BACKWARD)
    activation = build.input("activation", 50)
    first = build.compute("first", activation, size_bytes=10)
    second = build.compute("second", activation, first, size_bytes=10)
    program = build.output(build.compute("third", second, size_bytes=10))

    assert peak(program).live_bytes == (50, 60, 70, 20, 10)


def test_an_input_that_nothing_reads_stays_to_the_end() -> None:
    build = Builder()
    build.input("unused", 50)
    x = build.input("x", 1)
    program = build.output(build.compute("y", x, size_bytes=2))

    assert peak(program).live_bytes == (51, 51, 53, 52)


def _overlapped() -> tuple[Program, tuple[str, ...]]:
    """cast, launch, other, wait, use: the cast of the shard is dead to the graph once launched, but not to the wire."""
    build = Builder()
    x, shard = build.input("x", 1, held=True), build.input("shard", 8, held=True)
    cast = build.cast("cast", shard, 4)
    gather = build.all_gather("gather", cast, 16)
    other = build.compute("other", x, size_bytes=2)
    weight = build.wait("weight", gather)
    program = build.output(build.compute("use", other, weight, size_bytes=2))
    return program, program.order


def test_a_collective_allocates_at_its_launch_and_holds_its_input_until_its_wait() -> None:
    program, order = _overlapped()
    live = dict(zip(order, peak(program).live_bytes, strict=True))

    assert live["gather"] == 9 + 4 + 16
    assert live["other"] == 9 + 4 + 16 + 2  # the cast is still read by the collective
    assert live["weight"] == 9 + 4 + 16 + 2
    assert live["use"] == 9 + 16 + 2 + 2  # freed behind the wait


def test_a_coalesced_collective_holds_its_input_until_the_last_of_its_waits() -> None:
    build = Builder()
    shard = build.cast("cast", build.input("shard", 8, held=True), 4)
    gather = build.all_gather("gather", shard, 16)
    first = build.wait("first", gather)
    used = build.compute("used", first, size_bytes=1)
    second = build.wait("second", gather)
    program = build.output(build.compute("end", used, second, size_bytes=1))
    live = dict(zip(program.order, peak(program).live_bytes, strict=True))

    assert live["used"] == 8 + 4 + 16 + 1
    assert live["end"] == 8 + 16 + 1 + 1


def test_a_launch_without_a_wait_holds_its_input_to_the_end() -> None:
    build = Builder()
    cast = build.cast("cast", build.input("x", 1, held=True), 4)
    build.launch("lost", cast, CollectiveKind.ALL_REDUCE, Role.ACTIVATION, size_bytes=4)
    program = build.output(build.compute("y", "x", size_bytes=1))

    assert peak(program).live_bytes[-1] == 1 + 4 + 4 + 1


def test_a_view_keeps_its_base_alive_and_takes_nothing_itself() -> None:
    build = Builder()
    base = build.compute("base", build.input("x", 1, held=True), size_bytes=10)
    view = build.view("view", base)
    other = build.compute("other", "x", size_bytes=1)
    program = build.output(build.compute("use", other, view, size_bytes=1))
    live = dict(zip(program.order, peak(program).live_bytes, strict=True))

    assert live["view"] == live["base"] == 11
    assert live["use"] == 13


def test_an_in_place_op_counts_as_a_use_and_allocates_nothing() -> None:
    build = Builder()
    buffer = build.compute("buffer", build.input("x", 1, held=True), size_bytes=10)
    changed = build.in_place("changed", buffer, "x")
    program = build.output(build.compute("read", changed, size_bytes=1))

    assert peak(program).live_bytes == (1, 11, 11, 12, 2)


def test_what_nothing_reads_is_freed_at_once() -> None:
    build = Builder()
    x = build.input("x", 1, held=True)
    build.compute("dead", x, size_bytes=100)
    program = build.output(build.compute("y", x, size_bytes=5))

    assert peak(program).live_bytes == (1, 101, 6, 6)


def test_an_effect_token_of_no_bytes_extends_no_lifetime() -> None:
    """A token that depends on a big buffer is read at the very end: the buffer is not kept for it."""
    ops = (
        OpNode("x", OpKind.INPUT, "input", storages=(0,)),
        OpNode("big", OpKind.COMPUTE, "f", ("x",), (1,), category=Category.MATMUL),
        OpNode("token", OpKind.COMPUTE, "effect", ("big",), (2,), opaque=True),
        OpNode("y", OpKind.COMPUTE, "f", ("x",), (3,), category=Category.MATMUL),
        OpNode("output", OpKind.OUTPUT, "output", ("y", "token")),
    )
    storages = (Storage(0, 1, "x", True), Storage(1, 100, "big"), Storage(2, 0, "token"), Storage(3, 5, "y"))
    profile = peak(Program("token", Phase.FORWARD, ops, storages))

    assert profile.live_bytes == (1, 101, 101, 6, 6)


def test_gathering_everything_first_costs_the_sum_of_the_gathered_parameters() -> None:
    build = Builder()
    hidden = build.input("x", 1)
    for layer in range(3):
        weight = build.wait(f"w{layer}", build.all_gather(f"g{layer}", build.input(f"s{layer}", 4, held=True), 8))
        hidden = build.compute(f"mm{layer}", hidden, weight, size_bytes=1)
    program = build.output(hidden)
    gathers = [op.name for op in program.launches]
    inputs = [op.name for op in program.ops if op.kind is OpKind.INPUT]
    rest = [name for name in program.order if name not in (*inputs, *gathers)]

    assert peak(program, (*inputs, *gathers, *rest)).peak_bytes == 12 + 1 + 3 * 8 + 1
    as_written = [name for name in program.order if name not in inputs]
    assert peak(program, (*inputs, *as_written)).peak_bytes == 12 + 1 + 8 + 1


def test_what_passes_between_fused_ops_takes_no_memory() -> None:
    """x ─ square ─ mean ─ scale(x), one kernel: it reads x and writes scale; x is there until the kernel is done."""
    build = Builder()
    x = build.input("x", 100)
    square = build.compute("square", x, size_bytes=100, category=Category.POINTWISE)
    mean = build.compute("mean", square, size_bytes=10, category=Category.REDUCTION)
    scale = build.compute("scale", x, mean, size_bytes=100, category=Category.POINTWISE)
    program = build.output(build.compute("mm", scale, size_bytes=50))

    assert peak(program).live_bytes == (100, 200, 210, 210, 150, 50)
    assert peak(program, fused=clusters(program)).live_bytes == (100, 100, 100, 200, 150, 50)


def test_a_fused_kernel_holds_all_it_reads_until_its_last_op() -> None:
    build = Builder()
    a, b = build.input("a", 7), build.input("b", 5)
    first = build.compute("first", a, size_bytes=100, category=Category.POINTWISE)
    program = build.output(build.compute("second", first, b, size_bytes=1, category=Category.POINTWISE))

    assert peak(program, fused=clusters(program)).live_bytes == (12, 12, 12, 13, 1)


def test_what_every_reader_computes_again_takes_no_memory_and_keeps_its_sources() -> None:
    """x ─ half ─ use ─ mm ─ add(half): half is computed again in add's kernel, behind the matmul, so x lives until there."""
    build = Builder()
    x = build.input("x", 100)
    half = build.compute("half", x, size_bytes=40, category=Category.POINTWISE)
    use = build.compute("use", half, size_bytes=10, category=Category.POINTWISE)
    product = build.compute("mm", use, size_bytes=10)
    program = build.output(build.compute("add", half, product, size_bytes=20, category=Category.POINTWISE))

    assert peak(program).live_bytes == (100, 140, 50, 60, 70, 20)
    assert compiled_peak(program).live_bytes == (100, 100, 110, 120, 130, 20)


def test_a_look_up_fuses_with_what_makes_its_source_and_with_its_reader() -> None:
    """The loss: logits are widened, one of each row is picked, all are summed up: of no wide logits is there ever any."""
    build = Builder()
    logits = build.compute("mm", build.input("x", 10), size_bytes=100)
    wide = build.compute("wide", logits, size_bytes=200, category=Category.POINTWISE)
    picked = build.compute("picked", wide, size_bytes=4, category=Category.INDEX)
    program = build.output(build.compute("loss", picked, size_bytes=1, category=Category.REDUCTION))
    ops = tuple(replace(op, target="aten.gather.default") if op.name == "picked" else op for op in program.ops)

    assert peak(program).peak_bytes == 100 + 200
    assert compiled_peak(replace(program, ops=ops)).live_bytes == (10, 110, 100, 100, 101, 1)


@settings(max_examples=100, deadline=None)
@given(fsdp_programs(), st.randoms(use_true_random=False))
def test_the_estimate_for_compiled_code_is_never_above_the_bound_by_more_than_what_is_computed_again(
    program: Program, draws: random.Random
) -> None:
    """Sources of what is computed again live longer: by those bytes, and no more, the estimate may exceed the bound."""
    order = random_order(build_dag(program), draws)
    again = {name for cluster in clusters(program, indexed=True) for name in cluster.sources}
    longer_bytes = sum(storage.size_bytes for storage in program.storages if storage.owner in again)
    assert compiled_peak(program, order).peak_bytes <= peak(program, order).peak_bytes + longer_bytes


@settings(max_examples=100, deadline=None)
@given(fsdp_programs(), st.randoms(use_true_random=False))
def test_a_fused_estimate_differs_only_where_ops_fuse(program: Program, draws: random.Random) -> None:
    order = random_order(build_dag(program), draws)
    alone = [cluster for cluster in clusters(program) if len(cluster.members) == 1]
    assume(not any(cluster.unstored for cluster in alone))  # a result that nothing reads is never written
    assert peak(program, order, fused=alone) == peak(program, order)
    unstored = [name for cluster in clusters(program) for name in cluster.unstored]
    saved_bytes = sum(storage.size_bytes for storage in program.storages if storage.owner in unstored)
    fused, plain = peak(program, order, fused=clusters(program)), peak(program, order)
    assert plain.peak_bytes - fused.peak_bytes <= saved_bytes


def test_what_the_process_holds_beside_the_graph_is_part_of_the_base() -> None:
    program = _overlapped()[0]
    with_state = peak(program, resident_bytes=1000)
    assert with_state.base_bytes == 1000 + 9
    assert with_state.live_bytes == tuple(1000 + live for live in peak(program).live_bytes)


def test_an_empty_order_peaks_at_what_is_there_at_the_start() -> None:
    program = Program("empty", Phase.FORWARD, (), ())

    assert peak(program).live_bytes == ()
    assert peak(program).peak_bytes == 0


def _recount(program: Program, order: Sequence[str]) -> list[int]:
    """Alive while each op runs, counted from scratch for every op and every storage: slow and obviously right."""
    ends = {op.launch: op.name for name in order if (op := program.op(name)).kind is OpKind.WAIT}  # last wait wins
    at = {name: step for step, name in enumerate(order)}
    result = []
    for now in range(len(order)):
        total = 0
        for storage in program.storages:
            is_input = program.op(storage.owner).kind is OpKind.INPUT
            born = 0 if is_input else at[storage.owner]
            uses = [] if is_input else [at[storage.owner]]
            for op in program.ops:
                sources = {s for source in op.inputs for s in program.op(source).storages}
                if op.kind is OpKind.INPUT or storage.id not in sources | set(op.storages) | set(op.writes):
                    continue
                last = at[op.name]
                if op.kind is OpKind.LAUNCH and storage.id in sources:
                    last = at[ends[op.name]] if op.name in ends else len(order)
                uses.append(len(order) if op.kind is OpKind.OUTPUT else last)
            dies = len(order) if storage.held or not uses else max(uses)
            if born <= now <= dies:
                total += storage.size_bytes
        result.append(total)
    return result


@settings(max_examples=200, deadline=None)
@given(fsdp_programs(), st.randoms(use_true_random=False))
def test_the_profile_equals_a_naive_recount_for_random_programs_and_orders(
    program: Program, draws: random.Random
) -> None:
    order = random_order(build_dag(program), draws)
    profile = peak(program, order)

    assert list(profile.live_bytes) == _recount(program, order)
    assert profile.peak_bytes == max(profile.live_bytes)
    assert profile.live_bytes[order.index(profile.peak_op)] == profile.peak_bytes


@settings(max_examples=100, deadline=None)
@given(fsdp_programs(), st.randoms(use_true_random=False))
def test_a_ledger_foretells_what_each_op_does_and_a_copy_goes_its_own_way(
    program: Program, draws: random.Random
) -> None:
    order = [program.index[name] for name in random_order(build_dag(program), draws)]
    ledger = Ledger(Lifetimes(program))
    for position in order[: len(order) // 2]:
        before_bytes = ledger.live_bytes
        allocates, frees = ledger.allocates(position), ledger.frees(position)
        ledger.advance(position)
        assert ledger.live_bytes == before_bytes + allocates - frees
        assert ledger.peak_bytes >= before_bytes + allocates
    twin, live_bytes, peak_bytes = ledger.copy(), ledger.live_bytes, ledger.peak_bytes
    for position in order[len(order) // 2 :]:
        twin.advance(position)
    assert (ledger.live_bytes, ledger.peak_bytes) == (live_bytes, peak_bytes)
    assert twin.peak_bytes == peak(program, [program.ops[position].name for position in order]).peak_bytes


@given(data=st.data())
def test_the_peak_of_an_order_in_array_operations_is_that_of_the_ledger_op_by_op(data: st.DataObject) -> None:
    program = data.draw(fsdp_programs())
    order = random_order(build_dag(program), data.draw(st.randoms(use_true_random=False)))
    lifetimes = Lifetimes(program)
    assert lifetimes.peak_bytes([program.index[name] for name in order]) == peak(program, order).peak_bytes


@given(data=st.data())
def test_so_is_what_is_alive_at_each_op_in_whatever_order_the_program_is_written(data: st.DataObject) -> None:
    program, draws = data.draw(fsdp_programs()), data.draw(st.randoms(use_true_random=False))
    written, order = (random_order(build_dag(program), draws) for _ in range(2))
    moved = replace(program, ops=tuple(map(program.op, written)))
    lifetimes = Lifetimes(program).of_order([program.index[name] for name in written])
    during, after = lifetimes.live_bytes([moved.index[name] for name in order])
    ledger = Ledger(Lifetimes(program))
    for name, during_bytes, after_bytes in zip(order, during.tolist(), after.tolist(), strict=True):
        assert during_bytes == ledger.live_bytes + ledger.allocates(program.index[name])
        ledger.advance(program.index[name])
        assert after_bytes == ledger.live_bytes
