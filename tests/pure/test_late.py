"""Which waits of a backward are left to the step behind it."""

from __future__ import annotations

import pytest

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.graph.program import Phase, Program
from overlap_pass.schedule.late import Late, put_off
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder

MiB = 2**20
H100 = load_hardware("h100")


def backward(*, cast: bool = False) -> Program:
    """Two layers; the gradient of the last is reduced behind all compute, and cast where that is asked for."""
    build = Builder(phase=Phase.BACKWARD)
    one = build.compute("grad1", build.input("x", MiB), size_bytes=64 * MiB, flops=10**12)
    first = build.reduce_scatter("reduce1", one, 32 * MiB)
    two = build.compute("grad2", one, size_bytes=64 * MiB, flops=10**12)
    early = build.wait("wait1", first)
    middle = build.compute("grad3", two, size_bytes=MiB, flops=10**12)
    late = build.view("shard2", build.wait("wait2", build.reduce_scatter("reduce2", two, 32 * MiB)))
    return build.output(early, middle, build.cast("cast2", late, 32 * MiB) if cast else late)


def found(program: Program) -> Late | None:
    return put_off(program, program.order, simulate(program, price(program, H100)))


def test_waits_behind_the_last_compute_are_put_off() -> None:
    late = found(backward())
    assert late is not None
    assert late.waits == ("wait2",)


def test_a_wait_that_something_is_computed_from_is_not() -> None:
    assert found(backward(cast=True)) is None


def test_what_is_saved_is_what_the_step_takes_behind_its_last_compute() -> None:
    program = backward()
    late, costs = found(program), price(program, H100)
    assert late is not None
    assert late.saved_us == pytest.approx(costs.duration_us["reduce2"], rel=0.01), "it is launched behind all compute"


def test_an_activation_that_is_reduced_last_is_not_put_off() -> None:
    build = Builder(phase=Phase.BACKWARD)
    x = build.compute("y", build.input("x", MiB), size_bytes=MiB)
    gathered = build.wait("wait", build.all_gather("gather", x, 2 * MiB))
    assert found(build.output(gathered)) is None
