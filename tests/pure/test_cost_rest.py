"""A device that rests between kernels computes at a higher clock: when, how much, and that plans know it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_pass.cost.hardware import Hardware, load_hardware
from overlap_pass.cost.model import CostTable
from overlap_pass.cost.rest import as_rested
from overlap_pass.graph.program import Category, Program
from overlap_pass.memory.budget import Budget
from overlap_pass.planning import make_plan
from overlap_pass.schedule.strategies import AsWritten
from tests.pure.programs import Builder, prices

H200 = load_hardware("h200")
HOST = load_hardware("h200-host-staged")
MIB = 2**20


def gathered(*, groups: tuple[str, ...] = ("g0", "g0")) -> Program:
    """As many gathers as groups are named, a matmul of a dense layer behind each."""
    build = Builder()
    value = build.input("x", MIB, held=True)
    for i, group in enumerate(groups):
        shard = build.input(f"shard{i}", 32 * MIB, held=True)
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 64 * MIB, group=group))
        value = build.compute(f"mm{i}", value, weight, size_bytes=MIB, flops=10**12)
    return build.output(value)


def speedup(hardware: Hardware, program: Program, costs: CostTable) -> float:
    fast, slow = as_rested(hardware, program, costs).compute, hardware.compute
    assert fast.attention_efficiency / slow.attention_efficiency == pytest.approx(
        fast.matmul_efficiency / slow.matmul_efficiency
    )
    return fast.matmul_efficiency / slow.matmul_efficiency


@pytest.mark.parametrize(
    ("gather_us", "faster"),
    [
        (40.0, 1.0),  # 80 of communication under 100 of compute: no rest
        (50.0, 1.0),
        (60.0, 1.2 ** (1 / 3)),  # computes for at most 100 of 120
        (200.0, 1.14),  # the cube root of 4 is above the highest clock
    ],
)
def test_the_clock_rises_with_the_cube_root_of_the_time_that_compute_cannot_fill(gather_us, faster) -> None:
    program = gathered()
    costs = prices(program, {"mm0": 50.0, "mm1": 50.0, "ag0": gather_us, "ag1": gather_us})
    assert speedup(H200, program, costs) == pytest.approx(faster)


def test_what_rests_a_device_is_the_busiest_communicator_and_not_all_of_them() -> None:
    """Two communicators of 80 each run beside each other and beside 100 of compute."""
    program = gathered(groups=("g0", "g1"))
    costs = prices(program, {"mm0": 50.0, "mm1": 50.0, "ag0": 80.0, "ag1": 80.0})
    assert speedup(H200, program, costs) == 1.0


def test_kernels_that_launches_run_on_the_compute_lane_count_as_compute() -> None:
    program = gathered()
    costs = prices(program, {"mm0": 50.0, "mm1": 50.0, "ag0": 60.0, "ag1": 60.0})
    assert speedup(H200, program, replace(costs, kernel_us={"ag0": 20.0})) == 1.0


def test_a_machine_whose_speed_at_rest_was_not_measured_has_one_speed() -> None:
    program = gathered()
    assert as_rested(load_hardware("h100"), program, prices(program, {"ag0": 1e6})) == load_hardware("h100")


def test_gemms_reach_alone_in_a_step_through_host_memory_what_was_measured() -> None:
    """A GEMM of 2.2 TFLOP took 2.755 ms there, beside nothing: 0.807 of the peak."""
    program = gathered()
    rested = as_rested(HOST, program, prices(program, {"mm0": 50.0, "mm1": 50.0, "ag0": 100.0, "ag1": 100.0}))
    assert rested.compute.matmul_efficiency == pytest.approx(2.199e12 / 2.755e-3 / 989.4e12, rel=0.02)


@pytest.mark.parametrize(("machine", "rests"), [(H200, False), (HOST, True)])
def test_a_plan_prices_matmuls_as_fast_as_its_graph_lets_the_device_rest(machine: Hardware, rests: bool) -> None:
    """128 MiB are gathered in 0.3 ms over NVLink and in 2.8 ms through host memory; the matmuls take 1.4 ms each."""
    build = Builder()
    value = build.input("x", MIB, held=True)
    for i in range(2):
        shard = build.input(f"shard{i}", 64 * MIB, held=True)
        weight = build.wait(f"w{i}", build.all_gather(f"ag{i}", shard, 128 * MIB))
        value = build.compute(f"mm{i}", value, weight, size_bytes=MIB, flops=10**12, category=Category.MATMUL)
    program = build.output(value)
    tired = replace(machine, compute=replace(machine.compute, rested_speedup=None))
    took_us, always_us = (
        make_plan(program, one, AsWritten(), Budget.parse("unlimited")).before.compute_us for one in (machine, tired)
    )
    assert took_us == pytest.approx(always_us / 1.14 if rests else always_us, rel=0.01)
