"""Which gathered parameters stay for the backward: what fits, what pays, and the same on every rank."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import OpKind, Phase, Program
from overlap_pass.memory.budget import Absolute, Beside, Budget, Unlimited
from overlap_pass.memory.ledger import peak, resident_bytes
from overlap_pass.memory.staging import gathers_bytes
from overlap_pass.planning import make_plan
from overlap_pass.schedule.kept import gathered_twice, keep_in_backward, keep_in_forward
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.resharding import choose_kept
from overlap_pass.schedule.strategies import LatestStart
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder

MIB = 2**20
H100 = load_hardware("h100")


def step(sizes_mib: tuple[int, ...] = (64, 64, 64, 64), *, flops: int = 10**9) -> tuple[Program, Program]:
    """Forward and backward of a chain of matmuls; every weight is cast, gathered and read once in each."""
    forward, backward = Builder("forward"), Builder("backward", Phase.BACKWARD)
    value = forward.input("x", MIB, held=True)
    shards = [forward.input(f"primals_{i}", size * MIB, held=True) for i, size in enumerate(sizes_mib)]
    for i, size in enumerate(sizes_mib):
        value = forward.compute(f"mm{i}", value, _weight(forward, i, shards[i], size), size_bytes=MIB, flops=flops)
    gradient = backward.input("tangents_1", MIB)
    saved = [backward.input(f"saved{i}", MIB) for i in range(len(sizes_mib))]
    shards = [backward.input(f"primals_{i}", size * MIB, held=True) for i, size in enumerate(sizes_mib)]
    reduced = []
    for i, size in reversed(list(enumerate(sizes_mib))):
        weight = _weight(backward, i, shards[i], size)
        grown = backward.compute(f"dw{i}", gradient, saved[i], size_bytes=size * MIB, flops=flops)
        reduced.append(backward.wait(f"rw{i}", backward.reduce_scatter(f"rs{i}", grown, size * MIB // 2)))
        gradient = backward.compute(f"dx{i}", gradient, weight, size_bytes=MIB, flops=flops)
    return forward.output(value, *[]), backward.output(gradient, *reduced)


def _weight(build: Builder, number: int, shard: str, size_mib: int) -> str:
    cast = build.cast(f"cast{number}", shard, size_mib * MIB // 2)
    gather = build.all_gather(f"ag{number}", cast, size_mib * MIB, unit=f"block{number}")
    return build.view(f"t{number}", build.wait(f"w{number}", gather))


def together(kept, forward: Program, backward: Program) -> int:
    """The peak of the step as written."""
    first, second = keep_in_forward(forward, kept), keep_in_backward(backward, kept)
    second = replace(second, shared_bytes=gathers_bytes(first))
    return max(peak(first).peak_bytes, peak(second, resident_bytes=resident_bytes(first, second)).peak_bytes)


def test_a_kept_parameter_leaves_the_forward_and_enters_the_backward() -> None:
    forward, backward = step()
    gathers = gathered_twice(forward, backward)
    assert [gather.launch for gather in gathers] == ["ag3", "ag2", "ag1", "ag0"], "as the backward needs them"
    kept = gathers[:1]
    first, second = keep_in_forward(forward, kept), keep_in_backward(backward, kept)
    assert "w3" in first.ops[-1].inputs
    assert second.op("w3").kind is OpKind.INPUT
    assert not {"ag3", "cast3", "primals_3"} & set(second.order), "what led to it is gone"
    assert [op.name for op in second.launches if op.name.startswith("ag")] == ["ag2", "ag1", "ag0"]
    for program in (first, second):
        assert violations(program, program.order) == ()
        assert [storage.id for storage in program.storages] == list(range(len(program.storages)))
        assert all(storage.owner in program.index for storage in program.storages)


def test_what_is_kept_lives_from_its_gather_to_its_last_reader() -> None:
    """By hand: weight 0 is there while the forward runs on and until the last matmul of the backward."""
    forward, backward = step((64, 1, 1))
    kept = [gather for gather in gathered_twice(forward, backward) if gather.launch == "ag0"]
    before, after = peak(forward), peak(keep_in_forward(forward, kept))
    assert after.live_bytes[-1] - before.live_bytes[-1] == 64 * MIB
    second = keep_in_backward(backward, kept)
    beside = resident_bytes(forward, second)
    assert beside == (64 + 1) * MIB, "its shard, and the batch"
    live = dict(zip(second.order, peak(second, resident_bytes=beside).live_bytes, strict=True))
    assert (
        live["dw2"] - dict(zip(backward.order, peak(backward, resident_bytes=MIB).live_bytes, strict=True))["dw2"]
        == 64 * MIB
    )


def test_without_a_bound_everything_is_kept_and_the_step_is_shorter() -> None:
    forward, backward = step()
    found = choose_kept(forward, backward, H100, Unlimited())
    assert set(found.kept) == {"ag0", "ag1", "ag2", "ag3"}
    assert (found.gathered, found.kept_bytes, found.budget_bytes) == (4, 256 * MIB, None)
    assert found.saved_us > 0


def test_what_dies_before_the_peak_is_kept_for_nothing() -> None:
    """The peak stands at the end of the backward, where gradients are many: weights read before it cost no peak."""
    forward, backward = step()
    found = choose_kept(forward, backward, H100, Budget.parse("+0B"))
    kept = [gather for gather in gathered_twice(forward, backward) if gather.launch in found.kept]
    assert kept
    assert "ag0" not in found.kept, "read last"
    assert together(kept, forward, backward) <= together((), forward, backward)


def test_a_small_parameter_saves_more_per_byte() -> None:
    """A start costs the same for a kilobyte as for a megabyte: with room for some, the small ones stay."""
    forward, backward = step((128, 1, 128, 1))
    found = choose_kept(forward, backward, H100, Budget.parse("+60MiB"))
    assert set(found.kept) >= {"ag1", "ag3"}


def test_what_the_user_keeps_is_in_the_peak_that_a_relative_budget_is_relative_to() -> None:
    forward, backward = step()
    without = choose_kept(forward, backward, H100, Budget.parse("+0B"))
    asked = choose_kept(forward, backward, H100, Budget.parse("+0B"), asked=("ag0", "ag1", "ag2", "ag3"))
    assert asked.budget_bytes > without.budget_bytes
    assert asked.kept_bytes > without.kept_bytes


def test_a_step_that_gathers_nothing_keeps_nothing() -> None:
    build, other = Builder("forward"), Builder("backward", Phase.BACKWARD)
    first = build.output(build.compute("mm", build.input("x", MIB, held=True), size_bytes=MIB))
    second = other.output(other.compute("dmm", other.input("tangents_1", MIB), size_bytes=MIB))
    assert choose_kept(first, second, H100, Budget.parse("fsdp2")).kept == ()


@given(
    sizes=st.lists(st.sampled_from((1, 4, 32, 64)), min_size=1, max_size=5),
    extra=st.integers(0, 300),
    flops=st.sampled_from((10**6, 10**10, 10**12)),
)
@settings(max_examples=25)
def test_both_plans_keep_the_budget_of_the_step(sizes: list[int], extra: int, flops: int) -> None:
    forward, backward = step(tuple(sizes), flops=flops)
    found = choose_kept(forward, backward, H100, Budget.parse(f"+{extra}MiB"))
    kept = [gather for gather in gathered_twice(forward, backward) if gather.launch in found.kept]
    first, second = keep_in_forward(forward, kept), keep_in_backward(backward, kept)
    budget = Absolute(found.budget_bytes)
    plans = [
        make_plan(first, H100, LatestStart(), budget),
        make_plan(second, H100, LatestStart(), Beside(budget, resident_bytes(first, second))),
    ]
    assert max(plan.memory_after.peak_bytes for plan in plans) <= found.budget_bytes
    assert found.budget_bytes == together((), forward, backward) + extra * MIB


@pytest.mark.parametrize("flops", [10**6, 10**11, 10**13])
def test_more_budget_makes_no_longer_step(flops: int) -> None:
    forward, backward = step((64, 16, 64, 1, 32), flops=flops)
    saved = [choose_kept(forward, backward, H100, Budget.parse(f"+{extra}MiB")) for extra in range(0, 400, 40)]
    priced = Launches(order="priced")  # what all ranks share is chosen without this rank's prices, and promises less
    steps = []
    for decision in saved:
        kept = [gather for gather in gathered_twice(forward, backward) if gather.launch in decision.kept]
        first, second = keep_in_forward(forward, kept), keep_in_backward(backward, kept)
        budget = Absolute(decision.budget_bytes)
        plans = [
            make_plan(first, H100, LatestStart(), budget, launches=priced),
            make_plan(second, H100, LatestStart(), Beside(budget, resident_bytes(first, second)), launches=priced),
        ]
        steps.append(sum(plan.after.step_us for plan in plans))
    for less, more in itertools.pairwise(steps):
        assert more <= less * 1.001, "decided by quick plans: up to a thousandth"


def test_names_and_order_of_python_objects_do_not_matter() -> None:
    """The same graphs give the same decision however their inputs were numbered: nothing but the program is looked at."""
    forward, backward = step((64, 16, 64, 1, 32))
    again = choose_kept(replace(forward), replace(backward), H100, Budget.parse("+80MiB"), asked={"ag1", "ag2"})
    assert again == choose_kept(forward, backward, H100, Budget.parse("+80MiB"), asked=("ag2", "ag1"))


def test_a_shard_that_something_else_reads_stays_in_the_backward() -> None:
    forward, backward = step((64,))
    ops = list(backward.ops)
    ops[-1] = replace(ops[-1], inputs=(*ops[-1].inputs, "cast0"))
    read_twice = replace(backward, ops=tuple(ops))
    second = keep_in_backward(read_twice, gathered_twice(forward, read_twice))
    assert {"primals_0", "cast0", "w0"} <= set(second.order)
    assert "ag0" not in second.order


def _by_copy(program: Program) -> Program:
    return replace(
        program,
        ops=tuple(
            op if op.collective is None else replace(op, collective=replace(op.collective, by_copy=True))
            for op in program.ops
        ),
    )


def test_where_gathers_again_would_need_more_staging_than_the_budget_has_what_the_user_keeps_stays() -> None:
    """One weight of 64 MiB, kept, or gathered again through staging memory of three times its half, which its forward has not."""
    forward, backward = step((64,), flops=0)
    backward = _by_copy(backward)
    found = choose_kept(forward, backward, H100, Budget.parse("+0B"), asked=("ag0",))
    assert found.kept == ("ag0",)
    assert together(gathered_twice(forward, backward), forward, backward) <= found.budget_bytes
    assert together((), forward, backward) > found.budget_bytes


def test_gathers_again_need_no_staging_beyond_that_of_the_forward() -> None:
    forward, backward = map(_by_copy, step((64,)))
    kept = gathered_twice(forward, backward)
    assert together((), forward, backward) == together(kept, forward, backward)
