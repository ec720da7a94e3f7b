"""Every registered strategy on random FSDP-like programs, and each by hand where its rule shows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import Contention
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpNode, Phase, Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.feeding import Policy, feed
from overlap_pass.schedule.ground import Ground
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.strategies import (
    BUILTIN,
    AsWritten,
    BackwardPost,
    BackwardPre,
    Exact,
    FillGaps,
    LatestStart,
    LocalSearch,
)
from overlap_pass.schedule.types import Action, Problem
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, priced, prices


def chain(layers: int, *, weight_bytes: int = 100) -> Program:
    """x → (gather wᵢ → mmᵢ) for each layer, gathers written where they are used.

    shard0 ─ ag0 ─ w0 ┐   shard1 ─ ag1 ─ w1 ┐
    x ────────────── mm0 ───────────────── mm1 ─ … ─ output
    """
    build = Builder()
    value = build.input("x", 10, held=True)
    shards = [build.input(f"shard{layer}", weight_bytes // 2, held=True) for layer in range(layers)]
    for layer, shard in enumerate(shards):
        weight = build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, weight_bytes, unit=f"block{layer}"))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=10)
    return build.output(value)


def costs_of(program: Program, *, compute_us: float, gather_us: float, contention: Contention | None = None):
    durations = {op.name: gather_us for op in program.launches}
    durations |= {op.name: compute_us for op in program.ops if op.name.startswith("mm")}
    return prices(program, durations, contention=contention)


@pytest.mark.parametrize("strategy", [cls() for cls in BUILTIN if cls is not Exact], ids=lambda s: s.name)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_every_strategy_makes_a_legal_order(strategy, data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, None)
    assert violations(program, strategy.schedule(problem).order) == ()


_MOVES_COMPUTE = (Exact, FillGaps, LatestStart, LocalSearch)


@pytest.mark.parametrize("strategy", [cls() for cls in BUILTIN if cls not in _MOVES_COMPUTE], ids=lambda s: s.name)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_other_strategy_keeps_the_order_of_compute(strategy, data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, None)
    placement = Placement(problem.dag)
    anchors = [program.ops[position].name for position in placement.anchors]
    order = strategy.schedule(problem).order
    assert [name for name in order if name in set(anchors)] == anchors


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_latest_start_puts_compute_off_once_at_most(data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, None)
    anchors = {program.ops[position].name for position in Placement(problem.dag).anchors}
    steps = [program.index[name] for name in LatestStart().schedule(problem).order if name in anchors]
    assert sum(first > second for first, second in itertools.pairwise(steps)) <= 1


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_latest_start_keeps_any_budget_that_the_tight_order_keeps(data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, None)
    smallest_bytes = Room.of(Placement(problem.dag)).smallest_bytes
    budget_bytes = smallest_bytes + data.draw(st.integers(0, 64))
    schedule = LatestStart().schedule(Problem(problem.dag, problem.costs, budget_bytes))
    assert peak(program, schedule.order).peak_bytes <= budget_bytes


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_no_prefetch_holds_less_than_the_tight_order(data) -> None:
    """What ``smallest_bytes`` promises, where sizes are as in FSDP: shards are held, a gathered parameter is no smaller
    than what is sent, a cast gradient no larger than the gradient, a reduced one no larger than either."""
    program, costs = data.draw(priced())
    assume(all(_sizes_as_in_fsdp(program, op) for op in program.ops))
    problem = Problem(build_dag(program), costs, None)
    smallest_bytes = Room.of(Placement(problem.dag)).smallest_bytes
    for strategy in (BackwardPre(), BackwardPost(), LatestStart()):
        assert peak(program, strategy.schedule(problem).order).peak_bytes >= smallest_bytes


def _sizes_as_in_fsdp(program: Program, op: OpNode) -> bool:
    if op.name.startswith("shard_"):
        return all(program.storages[storage].held for storage in op.storages)
    if op.name.startswith("gather_"):
        return op.written_bytes >= op.read_bytes
    if op.name.startswith(("reduce_", "upcast_", "downcast_")):
        return op.written_bytes <= op.read_bytes
    return True


def test_as_written_moves_nothing() -> None:
    program = chain(3)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=5), None)
    assert AsWritten().schedule(problem).order == program.order


def test_latest_start_launches_one_computation_ahead_when_that_hides_the_gather() -> None:
    """Gathers of 8 µs under computations of 10 µs: one computation ahead is enough, and two would hold more."""
    program = chain(4)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    order = LatestStart().schedule(problem).order
    at = {name: place for place, name in enumerate(order)}
    for layer in (1, 2, 3):
        assert at[f"mm{layer - 1}"] > at[f"ag{layer}"], "launched before the computation that hides it"
    for layer in (2, 3):
        assert at[f"ag{layer}"] > at[f"mm{layer - 2}"], "and not earlier than it takes"
    step_us = simulate(program, problem.costs, order).step_us
    assert step_us == pytest.approx(8 + 4 * 10), "only the first gather is exposed"


def test_latest_start_runs_back_to_back_gathers_when_communication_is_the_limit() -> None:
    """Gathers of 20 µs under computations of 5 µs: the lane must never idle: 4 · 20 + the last computation."""
    program = chain(4)
    problem = Problem(build_dag(program), costs_of(program, compute_us=5, gather_us=20), None)
    order = LatestStart().schedule(problem).order
    assert simulate(program, problem.costs, order).step_us == pytest.approx(4 * 20 + 5)


def test_latest_start_holds_no_second_weight_when_the_budget_has_no_room_for_it() -> None:
    program = chain(4, weight_bytes=100)
    dag, costs = build_dag(program), costs_of(program, compute_us=10, gather_us=8)
    room = Room.of(Placement(dag))
    schedule = LatestStart().schedule(Problem(dag, costs, room.smallest_bytes))
    at = {name: place for place, name in enumerate(schedule.order)}
    assert all(at[f"ag{layer}"] > at[f"mm{layer - 1}"] for layer in (1, 2, 3))


def test_a_gradient_is_reduced_while_later_compute_runs_and_waited_for_at_the_end() -> None:
    """mm0 makes a gradient; its 8 µs reduction hides under mm1 (10 µs), the wait must not stand between them."""
    build = Builder(phase=Phase.BACKWARD)
    x = build.input("x", 10, held=True)
    gradient = build.compute("mm0", x, size_bytes=40)
    reduced = build.wait("g0", build.reduce_scatter("rs0", gradient, 20))
    program = build.output(build.compute("mm1", x, size_bytes=10), reduced)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    order = LatestStart().schedule(problem).order
    assert order.index("rs0") < order.index("mm1") < order.index("g0")
    assert simulate(program, problem.costs, order).step_us == pytest.approx(20)


def test_a_lane_does_not_idle_while_the_cast_of_what_it_sends_next_runs() -> None:
    """Each gradient takes 10 µs and its cast 5; a reduction takes 20, so from the first on the lane is what takes longest."""
    build = Builder(phase=Phase.BACKWARD)
    x = build.input("x", 10, held=True)
    returned, count = [], 8
    for layer in range(count):
        wide = build.cast(f"cast{layer}", build.compute(f"mm{layer}", x, size_bytes=40), 80)
        returned.append(build.wait(f"g{layer}", build.reduce_scatter(f"rs{layer}", wide, 20)))
    program = build.output(*returned)
    durations = {op.name: 20.0 for op in program.launches}
    durations |= {f"mm{layer}": 10.0 for layer in range(count)} | {f"cast{layer}": 5.0 for layer in range(count)}
    problem = Problem(build_dag(program), prices(program, durations), None)
    ground = Ground.shared(problem)
    order = [program.ops[position].name for position in place(ground.placement, feed(ground, Policy(), None))]
    assert simulate(program, problem.costs, order).step_us == 15 + count * 20


def test_the_replica_all_reduce_follows_its_reduce_scatter() -> None:
    """HSDP: reduce-scatter over one group, then all-reduce of the shard over another, both hidden under mm1, mm2."""
    from overlap_pass.graph.program import CollectiveKind, Role

    build = Builder(phase=Phase.BACKWARD)
    x = build.input("x", 10, held=True)
    gradient = build.compute("mm0", x, size_bytes=40)
    shard = build.wait("sharded", build.reduce_scatter("rs0", gradient, 20))
    whole = build.launch("ar0", shard, CollectiveKind.ALL_REDUCE, Role.GRADIENT, size_bytes=20, group="g1")
    reduced = build.wait("reduced", whole)
    value = build.compute("mm1", x, size_bytes=10)
    program = build.output(build.compute("mm2", value, size_bytes=10), reduced)
    costs = prices(program, {"mm0": 10, "mm1": 10, "mm2": 10, "rs0": 8, "ar0": 8})
    order = LatestStart().schedule(Problem(build_dag(program), costs, None)).order
    assert order.index("rs0") < order.index("sharded") < order.index("ar0") < order.index("mm2")
    assert simulate(program, costs, order).step_us == pytest.approx(30)


def test_backward_pre_gathers_the_next_unit_before_the_current_one_computes() -> None:
    program = chain(3)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    order = BackwardPre().schedule(problem).order
    assert order.index("ag1") < order.index("mm0") < order.index("ag2") < order.index("mm1")


def test_backward_pre_of_depth_two_is_one_unit_further_ahead() -> None:
    program = chain(4)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    order = BackwardPre(depth=2).schedule(problem).order
    assert order.index("ag2") < order.index("mm0") < order.index("ag3") < order.index("mm1")


def test_backward_post_gathers_a_unit_behind_the_compute_of_the_one_before() -> None:
    program = chain(3)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    order = BackwardPost().schedule(problem).order
    assert order.index("mm0") < order.index("ag1") < order.index("mm1") < order.index("ag2")


def test_every_gather_has_a_decision_with_a_reason() -> None:
    program = chain(3)
    problem = Problem(build_dag(program), costs_of(program, compute_us=10, gather_us=8), None)
    decisions = {decision.op: decision for decision in LatestStart().schedule(problem).decisions}
    assert set(decisions) == {"ag0", "ag1", "ag2"}
    assert decisions["ag1"].action is Action.HOIST
    assert decisions["ag1"].moved_over == 1
    assert decisions["ag0"].action is Action.KEEP
    assert all(decision.reason for decision in decisions.values())


def test_a_view_behind_a_wait_does_not_pin_it() -> None:
    """gather, wait, view, six computations, then the reader: all six stand between launch and wait (pytorch#127324)."""
    build = Builder()
    x, shard = build.input("x", 10, held=True), build.input("shard", 5, held=True)
    weight = build.view("v", build.wait("w", build.all_gather("ag", shard, 10)))
    value = x
    for step in range(6):
        value = build.compute(f"mm{step}", value, size_bytes=10)
    program = build.output(build.compute("mm_last", value, weight, size_bytes=10))
    problem = Problem(build_dag(program), costs_of(program, compute_us=1, gather_us=6), None)
    order = LatestStart().schedule(problem).order
    between = order[order.index("ag") : order.index("w")]
    assert sum(name.startswith("mm") for name in between) == 6
