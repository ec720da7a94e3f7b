"""Where nothing slows anything, the walk along the order says what the device does, to the last bit."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Program
from overlap_pass.simulate.engine import Simulator, simulate
from overlap_pass.simulate.recurrence import Recurrence
from tests.pure.programs import Builder, priced, prices, random_order


def _free(costs: CostTable) -> CostTable:
    return replace(costs, contention=Contention(), beside_compute={}, starts_between_kernels=False)


@settings(max_examples=200, deadline=None)
@given(priced(), st.randoms(use_true_random=False), st.sampled_from((1.0, 1.3)), st.floats(0.0, 50.0))
def test_steps_and_waits_are_those_of_the_device(
    case: tuple[Program, CostTable], draws: random.Random, stretch: float, ahead_us: float
) -> None:
    program, costs = case[0], replace(_free(case[1]), cpu_ahead_us=ahead_us)
    names = random_order(build_dag(program), draws)
    slower = {op.name: costs.duration_us[op.name] * stretch for op in program.launches}
    device = simulate(program, replace(costs, duration_us={**costs.duration_us, **slower}), names)
    order = tuple(program.index[name] for name in names)
    assert Recurrence.holds(program, costs)
    step_us, blocked_us = Recurrence(program, costs).walk(order, stretch=stretch)
    assert step_us == device.step_us
    assert {program.ops[launch].name: us for launch, us in blocked_us.items()} == pytest.approx(
        {name: us for name, us in device.blocked_us.items() if us > 0}
    )


@settings(max_examples=100, deadline=None)
@given(priced(), st.randoms(use_true_random=False))
def test_a_simulator_tells_the_same_of_an_order_either_way(
    case: tuple[Program, CostTable], draws: random.Random
) -> None:
    program, costs = case[0], _free(case[1])
    order = tuple(program.index[name] for name in random_order(build_dag(program), draws))
    simulator = Simulator(program, costs)
    whole = simulator.run(order)
    assert simulator.step_us(order) == simulator.step_us(order) == whole.step_us
    assert simulator.blocked_us(order) == pytest.approx(whole.blocked_us)
    assert simulator.step_us() == simulate(program, costs).step_us


def _one_gather() -> Program:
    build = Builder()
    shard = build.input("shard", 8, held=True)
    gathered = build.wait("wait", build.all_gather("gather", shard, 16))
    return build.output(build.compute("mm", gathered))


@pytest.mark.parametrize(
    "slow",
    [
        {"contention": Contention(communication_beside_compute=1.5)},
        {"beside_compute": {"gather": Contention(compute_beside_communication=1.2)}},
        {"starts_between_kernels": True},
        {"kernel_us": {"gather": 1.0}},
        {"most_pending": 6},
    ],
    ids=lambda slow: next(iter(slow)),
)
def test_what_slows_anything_is_left_to_the_device(slow: dict[str, object]) -> None:
    program = _one_gather()
    costs = prices(program, {"mm": 3.0, "gather": 5.0})
    assert Recurrence.holds(program, costs)
    assert not Recurrence.holds(program, replace(costs, **slow))


def test_so_are_collectives_by_copy_which_wait_for_their_place() -> None:
    program = _one_gather()
    costs = prices(program, {"mm": 3.0, "gather": 5.0})
    by_copy = tuple(
        op if op.collective is None else replace(op, collective=replace(op.collective, by_copy=True))
        for op in program.ops
    )
    assert not Recurrence.holds(replace(program, ops=by_copy), costs)


def test_a_wait_in_front_of_its_launch_is_refused() -> None:
    program = _one_gather()
    costs = prices(program, {"mm": 3.0, "gather": 5.0})
    order = [program.index[name] for name in ("shard", "wait", "gather", "mm", "output")]
    with pytest.raises(IllegalSchedule, match="wait 'wait' comes before its launch 'gather'"):
        Recurrence(program, costs).walk(order)
