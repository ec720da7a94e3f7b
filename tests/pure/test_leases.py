"""Places in shared memory for gathered parameters: disjoint while they are read, the same on all ranks, paid for once."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.errors import IllegalSchedule, PlanError
from overlap_pass.graph.dag import EdgeKind, build_dag
from overlap_pass.graph.program import Category, CollectiveKind, OpKind, OpNode, Program
from overlap_pass.graph.program import Phase as Stage
from overlap_pass.memory import leases
from overlap_pass.memory.budget import Beside, Budget
from overlap_pass.memory.leases import leased, placed
from overlap_pass.memory.ledger import peak
from overlap_pass.memory.places import ALIGNMENT, WORDS, Tenants
from overlap_pass.memory.staging import GATHERS_AT_ONCE, gathers_bytes, staging_bytes
from overlap_pass.planning import Plan, budget_within, make_plan, plan_step, replay
from overlap_pass.registry import parse
from overlap_pass.saved_plans import pinned
from overlap_pass.schedule import alike, leasing
from overlap_pass.schedule.agreement import agreed
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.leasing import leaves_room
from overlap_pass.schedule.pinned import Pinned
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder, fsdp_programs, random_order
from tests.pure.test_agreement import RANK_INDEPENDENT, on_another_rank
from tests.pure.test_strategies_promises import large

H200 = load_hardware("h200").replaying()
UNLIMITED = Budget.parse("unlimited")
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Iterator[None]:
    """Programs here are small, and next to nothing is gained in them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leases, "_LEAST_BYTES", 1)
        patch.setattr(alike, "_WORTH_MEMORY", 0.0)
        patch.setattr(leasing, "_WORTH", 0.0)
        patch.setattr(leasing, "_PAYS", 0.0)
        yield


def by_copy(program: Program) -> Program:
    """The program with copy engines for its gathers."""
    return replace(program, ops=tuple(map(_by_copy, program.ops)))


def _by_copy(op: OpNode) -> OpNode:
    if op.collective is None or op.collective.kind is not CollectiveKind.ALL_GATHER:
        return op
    return replace(op, kernel=True, collective=replace(op.collective, by_copy=True))


PROGRAMS = fsdp_programs(max_layers=6).map(large).map(by_copy)


def layers(count: int, weight_bytes: int = 4 * MIB, *, backward: bool = False) -> Program:
    """A product with each of so many gathered weights, gathered right before it or all at first."""
    build = Builder("backward" if backward else "forward")
    hidden = build.input("x", MIB)
    shards = [build.input(f"shard {n}", weight_bytes, held=True) for n in range(count)]
    for number, shard in enumerate(shards):
        gather = build.all_gather(f"gather {number}", shard, weight_bytes, unit=f"layer {number}")
        hidden = build.compute(
            f"mm {number}", hidden, build.wait(f"weight {number}", gather), size_bytes=MIB, flops=10**11
        )
    return by_copy(build.output(hidden))


# -- places


def shared_while_read(program: Program) -> list[tuple[str, str]]:
    """Of each two launches whose places have bytes in common, those of which the later stands before a reader of the earlier."""
    found = []
    for one, other in itertools.combinations([op for op in program.launches if op.name in program.leases], 2):
        first, second = program.leases[one.name], program.leases[other.name]
        apart = first.end_bytes <= second.offset_bytes or second.end_bytes <= first.offset_bytes
        if apart or one.collective.group != other.collective.group or not any(first.final):
            continue
        readers = [
            op for op in program.ops
            if op.kind is OpKind.COMPUTE and any(set(program.op(n).storages) & set(one.storages) for n in op.inputs)
        ]  # fmt: skip
        if any(program.index[op.name] > program.index[other.name] for op in readers):
            found.append((one.name, other.name))
    return found


@given(PROGRAMS, st.integers(0, 3))
def test_no_place_is_taken_while_it_is_read(program: Program, ahead: int) -> None:
    found = leased(agreed(program), ahead)
    assert shared_while_read(found) == []
    assert violations(found, found.order) == ()
    assert all(lease.offset_bytes % ALIGNMENT == 0 for lease in found.leases.values())


@given(PROGRAMS)
def test_what_lies_there_takes_no_bytes_of_its_own_and_all_else_what_it_took(program: Program) -> None:
    found = leased(agreed(program))
    final = {
        storage
        for name, lease in found.leases.items()
        for storage in itertools.compress(found.results(found.op(name)), lease.final)
    }
    for before, after in zip(program.storages, found.storages, strict=True):
        assert after.size_bytes == (0 if after.id in final else before.size_bytes)
    parameters = {s.id for s in program.storages if program.op(s.owner).collective and s.size_bytes}
    assert final <= parameters


@given(PROGRAMS, st.integers(0, 2), st.integers(0, 2**32))
def test_every_order_that_keeps_the_edges_keeps_the_places(program: Program, ahead: int, seed: int) -> None:
    found = leased(agreed(program), ahead)
    assume(found.leases)
    order = random_order(build_dag(found), random.Random(seed))
    assert violations(found, order) == ()
    moved = replace(found, ops=tuple(map(found.op, order)))
    assert shared_while_read(moved) == []


@given(PROGRAMS, st.integers(0, 2**32))
def test_a_launch_before_a_reader_of_what_it_displaces_is_found_out(program: Program, seed: int) -> None:
    found = leased(agreed(program))
    displacing = [(name, lease.behind) for name, lease in found.leases.items() if lease.behind]
    assume(displacing)
    name, behind = random.Random(seed).choice(displacing)
    made_for = {one for one in found.op(name).inputs if found.op(one).kind is not OpKind.INPUT}
    order = [one for one in found.order if one not in {name, *made_for}]
    at = max(order.index(one) for one in behind)
    early = (*order[:at], *(one for one in found.order if one in made_for), name, *order[at:])
    assert any(f"{name} takes the place of what" in one for one in violations(found, early))


def test_edges_say_why() -> None:
    program = leased(layers(6))
    name, lease = next((name, lease) for name, lease in program.leases.items() if lease.behind)
    assert build_dag(program).kinds(lease.behind[0], name) == {EdgeKind.PLACE}


def test_one_weight_at_a_time_needs_room_for_one_and_each_launch_ahead_for_one_more() -> None:
    sizes = [max(lease.end_bytes for lease in leased(layers(6), ahead).leases.values()) for ahead in range(4)]
    assert sizes == [4 * MIB, 8 * MIB, 12 * MIB, 16 * MIB]


@pytest.mark.parametrize("what", ["pointwise", "returned", "small", "in place", "communicator"])
def test_what_others_than_matmuls_read_stays_where_it_was(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    x, shard = build.input("x", 8), build.input("shard", 4, held=True)
    weight = build.view("view", build.wait("weight", build.all_gather("gather", shard, 8)))
    y = build.compute("mm", x, weight, size_bytes=8)
    if what == "pointwise":
        y = build.compute("mul", y, weight, size_bytes=8, category=Category.POINTWISE)
    elif what == "in place":
        build.in_place("mul_", weight, y)
    elif what == "small":
        monkeypatch.setattr(leases, "_LEAST_BYTES", 9)
    program = build.output(*([weight, y] if what == "returned" else [y]))
    program = program if what == "communicator" else by_copy(program)
    assert leased(program) is program


def test_a_copy_of_a_weight_is_read_by_whoever_reads_the_copy() -> None:
    build = Builder()
    x, shard = build.input("x", 8), build.input("shard", 4, held=True)
    copy = build.cast("pad", build.wait("weight", build.all_gather("gather", shard, 8)), 8)
    hidden = build.compute("mm", build.compute("mm 0", x, size_bytes=8), copy, size_bytes=8)
    later = build.wait("weight 2", build.all_gather("gather 2", shard, 8))
    program = leased(by_copy(build.output(build.compute("mm 2", hidden, later, size_bytes=8))))
    assert program.leases["gather 2"].behind == ("mm",)


# -- who must have left


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4), st.booleans()), max_size=60))
def test_whoever_comes_has_heard_of_all_whose_bytes_or_word_it_takes(places: list[tuple[int, int, bool]]) -> None:
    """By an awaited launch, which those before it are over with, or by a reader of what lay there."""
    tenants, over = Tenants(), -1
    for number, (start, size, final) in enumerate(places):
        gone, awaited = tenants.take(start, start + size, final)
        assert gone == sorted(gone)
        over = max(over, -1 if awaited is None else awaited, *(one for one in gone if places[one][2]), -1)
        for earlier, (first, length, was_final) in enumerate(places[:number]):
            meets = first < start + size and start < first + length
            if (meets and not was_final) or earlier == number - WORDS:
                assert earlier <= over
            covered = any(
                earlier < between and places[between][0] < first + length and first < sum(places[between][:2])
                for between in range(earlier + 1, number)
            )
            assert (earlier in gone) == (meets and not covered)


def test_a_word_is_used_again_when_the_launch_that_had_it_is_over() -> None:
    tenants = Tenants()
    awaited = [tenants.take(number, number + 1, final=True) for number in range(WORDS + 3)]
    assert awaited == [([], None)] * WORDS + [([], 0), ([], 1), ([], 2)]


# -- memory


def test_memory_that_is_shared_already_serves_the_next_graph_if_it_is_large_enough() -> None:
    program = leased(layers(6), 1)
    own = gathers_bytes(program)
    assert own == 8 * MIB
    assert gathers_bytes(program, leases=False) == GATHERS_AT_ONCE * 2 * MIB
    assert staging_bytes(replace(program, shared_bytes=10 * MIB)) == 10 * MIB
    assert staging_bytes(replace(program, shared_bytes=7 * MIB)) == 15 * MIB


def test_what_a_forward_shares_for_good_counts_against_the_budget_of_its_backward() -> None:
    program, extra = layers(6), Budget.parse("+8MiB")
    beside = Beside(extra, 0, shared_bytes=10 * MIB, staged_bytes=6 * MIB)
    written = peak(replace(program, shared_bytes=10 * MIB)).peak_bytes
    assert beside.resolve(program, written) == written - 4 * MIB + 8 * MIB
    assert beside.extra_over_written(program) == 4 * MIB


def test_a_forward_leaves_room_for_its_backward() -> None:
    program = leased(layers(6), 2)  # 12 MiB where staging would take 6, 24 MiB of shards
    assert leaves_room(program, Budget.parse("+6MiB"), 10**12)
    assert not leaves_room(program, Budget.parse("+5MiB"), 10**12)
    holds = peak(program).peak_bytes + 24 * MIB
    assert leaves_room(program, Budget.parse(holds), holds)
    assert not leaves_room(program, Budget.parse(holds), holds - 1)


# -- plans


@given(PROGRAMS, st.sampled_from((*RANK_INDEPENDENT, "1.1x", "fsdp2+64MiB")), st.sampled_from(("agreed", "priced")))
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
def test_a_plan_with_leases_keeps_its_budget_and_is_legal(program: Program, budget: str, order: str) -> None:
    plan = make_plan(program, H200, parse("fill_gaps"), Budget.parse(budget), launches=Launches(order=order))
    assert plan.budget_bytes is None or plan.memory_after.peak_bytes <= plan.budget_bytes
    assert violations(plan.program, plan.schedule.order) == ()
    moved = replace(plan.program, ops=tuple(map(plan.program.op, plan.schedule.order)))
    assert shared_while_read(moved) == []


@given(PROGRAMS, st.sampled_from(RANK_INDEPENDENT), st.integers(0, 2**32))
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
def test_ranks_that_compute_otherwise_choose_the_same_places(program: Program, budget: str, seed: int) -> None:
    other = on_another_rank(program, seed)
    lines = [make_plan(one, H200, parse("fill_gaps"), Budget.parse(budget)).launch_lines for one in (program, other)]
    assert lines[0] == lines[1]


def test_that_says_something() -> None:
    assert "of shared memory (1)" in planned(layers(8)).launch_lines[-1]


def planned(program: Program, *, budget: Budget = UNLIMITED, **rules: object) -> Plan:
    return make_plan(program, H200, parse("fill_gaps"), budget, launches=Launches(coalesce="off", **rules))


@pytest.mark.parametrize("order", ["agreed", "priced"])
def test_casts_write_less_and_the_step_is_shorter(order: str) -> None:
    program = layers(8, 64 * MIB)
    final, staged = planned(program, order=order), planned(program, order=order, final_places=False)
    assert len(final.program.leases) == 8
    assert not staged.program.leases
    # A quarter of what was moved: 128 MiB of float32 are read for 64 MiB of bfloat16 on two ranks.
    casts_us = [sum(price(plan.program, H200).kernel_us.values()) for plan in (final, staged)]
    assert casts_us[1] - casts_us[0] == pytest.approx(8 * H200.traffic_us(32 * MIB))
    assert final.after.step_us < staged.after.step_us


@pytest.mark.parametrize("order", ["agreed", "priced"])
@pytest.mark.parametrize(("ranks", "worth"), [(2, True), (8, False)])
def test_eight_ranks_would_save_too_little(
    ranks: int, worth: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 MiB, two ranks write 32 once and not twice and fetch as much; eight write 8 so, and fetch 56."""
    monkeypatch.setattr(leasing, "_PAYS", 0.05)
    program = layers(8, 64 * MIB)
    ops = tuple(
        op if op.collective is None else replace(op, collective=replace(op.collective, group_size=ranks))
        for op in program.ops
    )
    assert bool(planned(replace(program, ops=ops, groups={"g0": ranks}), order=order).program.leases) is worth


def test_as_written_puts_nothing_there() -> None:
    plan = make_plan(layers(8, 64 * MIB), H200, parse("as_written"), UNLIMITED)
    assert not plan.program.leases


def test_a_backward_counts_what_its_forward_shares() -> None:
    forward = planned(layers(8, 64 * MIB))
    shared = gathers_bytes(forward.program)
    assert shared > gathers_bytes(forward.program, leases=False)
    backward = replace(layers(4, 8 * MIB), name="backward", phase=Stage.BACKWARD)
    within = budget_within(UNLIMITED, backward, [forward])
    plan = planned(backward, budget=within)
    assert plan.memory_after.base_bytes >= shared
    alone = planned(backward)
    assert gathers_bytes(alone.program) < shared
    assert plan.memory_after.base_bytes - alone.memory_after.base_bytes >= shared - gathers_bytes(alone.program)


# -- saved


def saved(program: Program, plan: Plan) -> dict[str, object]:
    found: dict[str, object] = json.loads(json.dumps(pinned(program, plan).to_json()))
    return found


@pytest.mark.parametrize("order", ["agreed", "priced"])
def test_a_saved_plan_has_its_places(order: str) -> None:
    program = layers(8, 64 * MIB)
    plan = planned(program, order=order)
    again = replay(program, H200, UNLIMITED, Pinned.from_json(saved(program, plan)))
    assert again.program.leases == plan.program.leases
    assert again.launch_lines == plan.launch_lines
    assert again.after.step_us == plan.after.step_us


def test_saved_places_that_were_changed_are_refused() -> None:
    program = layers(8, 64 * MIB)
    data = saved(program, planned(program))
    offsets = dict(data["offsets"])  # type: ignore[call-overload]
    name = "gather 7"
    with pytest.raises(PlanError, match="its launches are not those of its hash"):
        replay(program, H200, UNLIMITED, Pinned.from_json({**data, "offsets": {**offsets, name: 2**40}}))
    with pytest.raises(IllegalSchedule, match="takes the place of what"):
        replay(program, H200, UNLIMITED, Pinned.from_json({**data, "offsets": dict.fromkeys(offsets, 0)}))
    del offsets[name]
    with pytest.raises(PlanError, match="places are given for 7 launches, of which 0 are all of a communicator"):
        replay(program, H200, UNLIMITED, Pinned.from_json({**data, "offsets": offsets}))


@given(PROGRAMS)
def test_a_program_with_leases_is_read_back_as_it_was_written(program: Program) -> None:
    found = leased(agreed(program))
    assert Program.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert placed(agreed(program), {name: lease.offset_bytes for name, lease in found.leases.items()}) == found


# -- steps


def step(sizes_mib: list[int], again: list[bool]) -> tuple[Program, Program]:
    """A forward that multiplies by all weights, and a backward that gathers some of them again."""
    forward, backward = Builder("forward"), Builder("backward", Stage.BACKWARD)
    hidden, gradient = forward.input("x", MIB), backward.input("tangents_1", MIB)
    for number, size in enumerate(sizes_mib):
        shard = forward.input(f"primals_{number}", size * MIB, held=True)
        weight = forward.wait(f"w{number}", forward.all_gather(f"ag{number}", shard, size * MIB, unit=f"u{number}"))
        hidden = forward.compute(f"mm{number}", hidden, weight, size_bytes=MIB, flops=10**11)
    for number, size in reversed([*enumerate(sizes_mib)]):
        if again[number]:
            shard = backward.input(f"primals_{number}", size * MIB, held=True)
            gather = backward.all_gather(f"ag{number}", shard, size * MIB, unit=f"u{number}")
            weight = backward.wait(f"w{number}", gather)
            gradient = backward.compute(f"dx{number}", gradient, weight, size_bytes=MIB, flops=10**11)
    return by_copy(forward.output(hidden)), by_copy(backward.output(gradient))


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=7),
    st.sampled_from(("fsdp2", "+0B", "+5MiB", "fsdp2+4MiB")),
    st.sampled_from(("agreed", "priced")),
)
@settings(max_examples=40, phases=[Phase.explicit, Phase.generate])
def test_a_forward_takes_nothing_that_its_backward_cannot_do_without(sizes: list[int], budget: str, order: str) -> None:
    programs = step(sizes, [True] * len(sizes))
    plans = plan_step(programs, H200, parse("fill_gaps"), Budget.parse(budget), launches=Launches(order=order))
    for plan in plans:
        assert plan.budget_bytes is not None
        assert plan.memory_after.peak_bytes <= plan.budget_bytes
    # The bound of a backward does not rise with what its forward shares.
    staged = plan_step(
        programs, H200, parse("fill_gaps"), Budget.parse(budget), launches=Launches(order=order, final_places=False)
    )
    if plans[0].coalesced == staged[0].coalesced:
        assert plans[1].budget_bytes == staged[1].budget_bytes
