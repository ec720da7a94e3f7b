"""The simulator: exact by hand without contention, fluid with it, CUDA's rules of streams and events."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpKind, Program
from overlap_pass.simulate.engine import Simulator, simulate
from overlap_pass.timeline.spans import SpanKind
from tests.pure.programs import Builder, fsdp_programs, priced, prices, random_order


def _two_collectives(reduction_group: str) -> Program:
    """gather and reduction launched first, one matmul beside them, one behind the gather's wait."""
    build = Builder()
    x, shard, gradient = build.input("x"), build.input("shard"), build.input("gradient")
    gather = build.all_gather("gather", shard)
    reduction = build.reduce_scatter("reduction", gradient, group=reduction_group)
    first = build.compute("first", x)
    second = build.compute("second", first, build.wait("weight", gather))
    return build.output(second, build.wait("reduced", reduction))


_TIMES = {"gather": 8.0, "reduction": 8.0, "first": 10.0, "second": 10.0}


def test_one_communicator_runs_one_collective_at_a_time() -> None:
    """gather 0–8 and reduction 8–16 stand beside the matmuls 0–10 and 10–20."""
    program = _two_collectives("g0")
    result = simulate(program, prices(program, _TIMES))
    spans = {span.name: (span.start_ns, span.end_ns) for span in result.timeline.spans}
    assert result.step_us == 20
    assert spans == {
        "first": (0, 10_000),
        "second": (10_000, 20_000),
        "gather": (0, 8_000),
        "reduction": (8_000, 16_000),
    }


def test_two_communicators_may_run_side_by_side() -> None:
    program = _two_collectives("g1")
    result = simulate(program, prices(program, _TIMES))
    spans = {span.name: (span.start_ns, span.end_ns) for span in result.timeline.spans}
    assert result.step_us == 20
    assert spans["gather"] == spans["reduction"] == (0, 8_000)


def test_a_gather_and_a_reduction_of_one_group_without_compute_take_the_sum() -> None:
    build = Builder()
    gather = build.all_gather("gather", build.input("shard"))
    reduction = build.reduce_scatter("reduction", build.input("gradient"))
    program = build.output(build.wait("weight", gather), build.wait("reduced", reduction))
    result = simulate(program, prices(program, _TIMES))
    assert (result.step_us, result.exposed_us, result.communication_us, result.compute_us) == (16, 16, 16, 0)


def test_a_collective_starts_only_when_what_was_issued_before_it_has_finished() -> None:
    """The gather reads an input, but the event of its launch stands behind the first matmul."""
    build = Builder()
    x, shard = build.input("x"), build.input("shard")
    first = build.compute("first", x)
    gather = build.all_gather("gather", shard)
    program = build.output(build.compute("second", first, build.wait("weight", gather)))
    costs = prices(program, _TIMES)

    issue, data = (simulate(program, costs, launch_after=rule) for rule in ("issue", "data"))

    assert (issue.step_us, issue.exposed_us, issue.blocked_us) == (28, 8, {"gather": 8})
    assert (data.step_us, data.exposed_us, data.blocked_us) == (20, 0, {"gather": 0})


def test_with_data_a_collective_still_waits_for_the_write_of_what_it_reads() -> None:
    build = Builder()
    buffer = build.input("buffer", 4)
    build.in_place("filled", buffer)
    build.compute("other", build.input("x"))
    gather = build.all_gather("gather", buffer)
    program = build.output(build.wait("weight", gather), "filled")
    costs = prices(program, {"filled": 5.0, "other": 7.0, "gather": 3.0})
    assert simulate(program, costs, launch_after="data").step_us == 12  # gather 5–8 beside other 5–12


def test_a_wait_blocks_compute_that_needs_nothing_of_it() -> None:
    build = Builder()
    x, shard = build.input("x"), build.input("shard")
    gather = build.all_gather("gather", shard)
    weight = build.wait("weight", gather)
    program = build.output(build.compute("first", x), weight)
    late = (*program.order[:3], "first", "weight", "output")
    costs = prices(program, _TIMES)

    as_written, better = simulate(program, costs), simulate(program, costs, late)

    assert (as_written.step_us, as_written.blocked_us["gather"]) == (18, 8)
    assert (better.step_us, better.blocked_us["gather"]) == (10, 0)


def test_a_copy_engine_runs_beside_the_communicator_of_its_group() -> None:
    program = _two_collectives("g0")
    costs = replace(prices(program, _TIMES), lanes={"gather": "copy engine"})
    spans = {span.name: span for span in simulate(program, costs).timeline.spans}
    assert (spans["gather"].lane, spans["reduction"].lane) == ("copy engine", "g0")
    assert spans["reduction"].start_ns == 0


def test_several_waits_of_one_launch_block_once() -> None:
    build = Builder()
    gather = build.all_gather("gather", build.input("shard"))
    one, other = build.wait("one", gather), build.wait("other", gather)
    program = build.output(build.compute("first", one, other))
    result = simulate(program, prices(program, _TIMES))
    assert (result.step_us, result.blocked_us["gather"]) == (18, 8)


def test_a_wait_before_its_launch_is_refused_by_both_names() -> None:
    program = _two_collectives("g0")
    order = ["x", "shard", "gradient", "weight", "gather", *(n for n in program.order[4:] if n != "weight")]
    with pytest.raises(IllegalSchedule, match=r"'weight'.*'gather'"):
        simulate(program, prices(program, _TIMES), order)


# Starts between kernels


def _one_ahead(launch_before: str) -> tuple[Program, CostTable]:
    """Matmuls first (10) and second (10), a gather (8) that nothing needs, launched just before one of them."""
    build = Builder()
    x, shard = build.input("x"), build.input("shard")
    if launch_before == "first":
        build.all_gather("gather", shard)
    first = build.compute("first", x)
    if launch_before == "second":
        build.all_gather("gather", shard)
    program = build.output(build.compute("second", first), build.wait("weight", "gather"))
    return program, replace(prices(program, _TIMES), starts_between_kernels=True)


def test_a_collective_that_comes_with_an_op_finds_the_device_full_and_starts_behind_it() -> None:
    program, costs = _one_ahead("first")
    spans = {span.name: (span.start_ns, span.end_ns) for span in simulate(program, costs).timeline.spans}
    assert spans == {"first": (0, 10_000), "gather": (10_000, 18_000), "second": (10_000, 20_000)}


def test_a_collective_launched_before_the_last_op_is_exposed_then() -> None:
    program, costs = _one_ahead("second")
    result = simulate(program, costs)
    assert (result.step_us, result.exposed_us) == (28, 8)
    assert simulate(program, replace(costs, starts_between_kernels=False)).step_us == 20


def test_a_copy_engine_needs_no_place_between_kernels() -> None:
    program, costs = _one_ahead("second")
    assert simulate(program, replace(costs, lanes={"gather": "copy engine"})).step_us == 20


def test_a_collective_behind_another_takes_over_its_place() -> None:
    """Both are launched before first (0–10), so the gather runs 10–18. second needs it and starts at 18 as the
    reduction becomes ready, which runs in the gather's place beside it all the same."""
    program = _two_collectives("g0")
    costs = replace(prices(program, _TIMES), starts_between_kernels=True)
    spans = {span.name: (span.start_ns, span.end_ns) for span in simulate(program, costs).timeline.spans}
    assert spans["gather"] == (10_000, 18_000)
    assert spans["reduction"] == (18_000, 26_000)


def test_in_a_recorded_graph_the_op_that_waited_for_a_collective_starts_before_the_collective_behind_it() -> None:
    """Of a step through host memory on 2 × H200: a GEMM began 11 µs after the gather it had waited for, and the next gather
    when that GEMM drained, 1.17 ms after. So the reduction above starts behind second."""
    program = _two_collectives("g0")
    costs = replace(prices(program, _TIMES), starts_between_kernels=True, recorded=True)
    spans = {span.name: (span.start_ns, span.end_ns) for span in simulate(program, costs).timeline.spans}
    assert spans["second"] == (18_000, 28_000)
    assert spans["reduction"] == (28_000, 36_000)


# The CPU


def test_a_step_that_the_cpu_cannot_feed_takes_the_cpus_time_plus_the_last_op() -> None:
    """Four ops of 1 µs, 10 µs to launch each: the last one runs from 40 to 41."""
    program, names = Builder().chain(4)
    result = simulate(program, prices(program, dict.fromkeys(names, 1.0), launch_us=dict.fromkeys(names, 10.0)))
    assert (result.step_us, result.cpu_us, result.compute_us, result.idle_us) == (41, 40, 4, 37)


def test_a_cpu_that_runs_ahead_costs_only_the_first_launch() -> None:
    program, names = Builder().chain(4)
    result = simulate(program, prices(program, dict.fromkeys(names, 10.0), launch_us=dict.fromkeys(names, 1.0)))
    assert result.step_us == 41


def test_a_cpu_that_is_ahead_of_the_device_when_the_step_begins_is_late_only_for_what_is_left() -> None:
    """Four ops of 1 µs, 10 µs to launch each, 25 µs ahead: two are there at 0, the others come at 5 and 15."""
    program, names = Builder().chain(4)
    costs = prices(program, dict.fromkeys(names, 1.0), launch_us=dict.fromkeys(names, 10.0))
    result = simulate(program, replace(costs, cpu_ahead_us=25.0))
    assert (result.step_us, result.cpu_us, result.compute_us, result.idle_us) == (16, 15, 4, 12)
    assert simulate(program, replace(costs, cpu_ahead_us=1000.0)).step_us == 4, "nothing but the device is left"


def test_a_collective_waits_for_the_cpu_too() -> None:
    build = Builder()
    gather = build.all_gather("gather", build.input("shard"))
    program = build.output(build.wait("weight", gather))
    result = simulate(program, prices(program, {"gather": 8.0}, launch_us={"gather": 5.0}))
    assert (result.step_us, result.idle_us, result.exposed_us) == (13, 5, 8)


def test_an_op_that_only_the_cpu_runs_lengthens_the_step_to_its_end() -> None:
    build = Builder()
    first = build.compute("first", build.input("x"))
    program = build.output(build.compute("second", first))
    assert simulate(program, prices(program, {"first": 2.0}, launch_us={"second": 9.0})).step_us == 9


# Contention


def test_while_both_run_each_goes_at_its_own_reduced_rate() -> None:
    """Compute at 1/1.25, communication at 1/1.5. gather (8) ends at 12 beside first (10), which ends at 12.5. The
    reduction runs 12–24: beside first to 12.5, beside second after; second has done 11.5/1.25 = 9.2 of 10 at 24 and
    the rest alone: 24.8."""
    program = _two_collectives("g0")
    result = simulate(program, prices(program, _TIMES, contention=Contention(1.25, 1.5, 1.0)))
    assert result.step_us == pytest.approx(24.8)
    assert result.compute_us == pytest.approx(24.8)
    assert result.communication_us == pytest.approx(24)


def test_two_collectives_on_one_wire_share_it_and_on_two_do_not() -> None:
    """Factor 2 is an equal share: 8 and 8 together take 16 on one wire, 8 on two."""
    build = Builder()
    gather = build.all_gather("gather", build.input("shard"))
    reduction = build.reduce_scatter("reduction", build.input("gradient"), group="g1")
    program = build.output(build.wait("weight", gather), build.wait("reduced", reduction))
    costs = prices(program, _TIMES, contention=Contention(1.0, 1.0, 2.0))
    apart = CostTable(costs.duration_us, costs.launch_us, costs.contention, wires={"g0": "nvlink", "g1": "network"})
    assert simulate(program, costs).step_us == pytest.approx(16)
    assert simulate(program, apart).step_us == pytest.approx(8)


def test_three_collectives_on_one_wire_take_the_documented_share_each() -> None:
    """1 + (k - 1)(1.5 - 1) = 2 for k = 3."""
    build = Builder()
    gathers = [build.all_gather(f"gather{n}", build.input(f"shard{n}"), group=f"g{n}") for n in range(3)]
    program = build.output(*(build.wait(f"w{n}", gather) for n, gather in enumerate(gathers)))
    costs = prices(program, dict.fromkeys(gathers, 10.0), contention=Contention(1.0, 1.0, 1.5))
    assert simulate(program, costs).step_us == pytest.approx(20)


def test_a_collective_may_have_factors_of_its_own() -> None:
    """A gather by copy engine (1.0, 1.0) beside a matmul costs nothing; by the general factors both would be slower."""
    build = Builder()
    gather = build.all_gather("gather", build.input("shard"))
    program = build.output(build.compute("first", build.input("x")), build.wait("weight", gather))
    costs = prices(program, _TIMES, contention=Contention(1.25, 1.5, 1.0))
    own = CostTable(costs.duration_us, costs.launch_us, costs.contention, beside_compute={"gather": Contention()})
    assert simulate(program, own).step_us == 10
    assert simulate(program, costs).step_us == pytest.approx(12.4)  # the gather ends at 12, 9.6 of first are done


# Properties


@settings(max_examples=200, deadline=None)
@given(priced(), st.randoms(use_true_random=False))
def test_no_lane_runs_two_things_at_once_and_all_figures_fit_together(
    case: tuple[Program, CostTable], draws: random.Random
) -> None:
    program, costs = case
    result = simulate(program, costs, random_order(build_dag(program), draws), label="random")
    spans = result.timeline.spans

    assert list(spans) == sorted(spans, key=lambda s: (s.start_ns, s.lane, s.name))
    for lane in {span.lane for span in spans}:
        mine = [span for span in spans if span.lane == lane]
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(mine))
    running = {
        op.name for op in program.ops if op.kind in (OpKind.COMPUTE, OpKind.LAUNCH) and costs.duration_us[op.name]
    }
    assert {span.name for span in spans} == running
    assert all(0 <= span.start_ns < span.end_ns <= result.timeline.window_ns for span in spans)
    assert result.timeline.label == "random"
    assert (
        result.compute_us >= sum(costs.duration_us[op.name] for op in program.ops if op.kind is OpKind.COMPUTE) - 1e-6
    )
    assert result.step_us >= result.compute_us - 1e-6
    assert result.step_us >= sum(costs.launch_us.values()) - 1e-6
    assert result.idle_us >= -1e-6
    assert -1e-6 <= result.exposed_us <= result.communication_us + 1e-6


def _recurrence(program: Program, costs: CostTable, order: tuple[str, ...]) -> float:
    """Without contention every start is a maximum of a few ends: the textbook recurrence, op by op."""
    cpu = compute = end = 0.0
    lanes: dict[str, float] = {}
    ends: dict[str, float] = {}
    for name in order:
        op = program.op(name)
        cpu += costs.launch_us[name]
        if op.collective is not None:
            lane = costs.lane_of(name, op.collective)
            ends[name] = lanes[lane] = max(cpu, compute, lanes.get(lane, 0.0)) + costs.duration_us[name]
        elif op.launch is not None:
            compute = max(compute, cpu, ends[op.launch])
        elif op.kind is OpKind.COMPUTE and costs.duration_us[name]:
            compute = max(compute, cpu) + costs.duration_us[name]
        end = max(end, cpu, compute, *lanes.values())
    return end


@settings(max_examples=200, deadline=None)
@given(priced(), st.randoms(use_true_random=False))
def test_without_contention_the_step_is_that_of_the_textbook_recurrence(
    case: tuple[Program, CostTable], draws: random.Random
) -> None:
    program, costs = case
    free = replace(costs, contention=Contention(), beside_compute={}, starts_between_kernels=False)
    order = random_order(build_dag(program), draws)
    assert simulate(program, free, order).step_us == _recurrence(program, free, order)


@settings(max_examples=100, deadline=None)
@given(priced(), st.randoms(use_true_random=False))
def test_the_bare_step_of_a_simulator_is_that_of_the_whole_result(
    case: tuple[Program, CostTable], draws: random.Random
) -> None:
    program, costs = case
    simulator = Simulator(program, costs)
    for _ in range(3):
        order = random_order(build_dag(program), draws)
        positions = [program.index[name] for name in order]
        assert (
            simulator.step_us(positions) == simulator.run(positions).step_us == simulate(program, costs, order).step_us
        )


@settings(max_examples=100, deadline=None)
@given(priced(), st.randoms(use_true_random=False), st.floats(0.2, 1.5), st.sampled_from((1.0, 1.3)))
def test_a_step_with_a_limit_or_slower_collectives_is_that_without_or_of_such_prices(
    case: tuple[Program, CostTable], draws: random.Random, share: float, stretch: float
) -> None:
    program, costs = case
    slower = {op.name: costs.duration_us[op.name] * stretch for op in program.launches}
    stretched = replace(costs, duration_us={**costs.duration_us, **slower})
    names = random_order(build_dag(program), draws)
    step_us = simulate(program, stretched, names).step_us
    order, simulator = tuple(program.index[name] for name in names), Simulator(program, costs)
    limit_us = share * step_us
    for _ in range(2):  # the second time with what the first has left
        assert simulator.step_us(order, limit_us, stretch=stretch) == (step_us if step_us <= limit_us else math.inf)
        assert simulator.step_us(order, stretch=stretch) == step_us


@settings(max_examples=100, deadline=None)
@given(fsdp_programs())
def test_without_collectives_the_step_is_the_sum_of_compute(program: Program) -> None:
    costs = prices(program, {op.name: 3.0 for op in program.ops if op.kind is OpKind.COMPUTE})
    result = simulate(program, costs)
    assert result.step_us == result.compute_us == sum(costs.duration_us.values())
    assert {span.kind for span in result.timeline.spans} <= {SpanKind.COMPUTE}


@settings(max_examples=100, deadline=None)
@given(priced(), st.randoms(use_true_random=False))
def test_starting_on_data_is_never_later_than_starting_on_issue_without_contention(
    case: tuple[Program, CostTable], draws: random.Random
) -> None:
    program, costs = case
    free = CostTable(costs.duration_us, costs.launch_us, Contention())
    order = random_order(build_dag(program), draws)
    data, issue = (simulate(program, free, order, launch_after=rule).step_us for rule in ("data", "issue"))
    assert data <= issue
