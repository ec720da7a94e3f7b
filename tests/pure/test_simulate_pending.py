"""A recorded graph holds compute up behind collectives that are issued and cannot begin yet: CUDA has 8 queues to the device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import COPY_ENGINE, CostTable, price
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Program
from overlap_pass.simulate.bound import lower_bound
from overlap_pass.simulate.engine import Simulation, simulate
from tests.pure.programs import Builder, fsdp_programs, priced, prices, random_order


def many(count: int, *groups: str) -> Program:
    """So many gathers launched at once, then compute that waits for none of them, then one op that waits for all."""
    build = Builder()
    x, shard = build.input("x"), build.input("shard")
    launches = [build.all_gather(f"ag{i}", shard, group=groups[i % len(groups)]) for i in range(count)]
    first = build.compute("first", x)
    waits = [build.wait(f"w{i}", launch) for i, launch in enumerate(launches)]
    return build.output(build.compute("last", first, *waits))


def costs_of(program: Program, **launch_us: float) -> CostTable:
    times = {"first": 5.0, "last": 5.0, **{op.name: 10.0 for op in program.launches}}
    return prices(program, times, launch_us=launch_us)


def start_us(result: Simulation, name: str) -> float:
    return next(span.start_ns for span in result.timeline.spans if span.name == name) / 1e3


@pytest.mark.parametrize(("count", "held_us"), [(6, 0.0), (7, 0.0), (8, 10.0), (10, 30.0)])
def test_compute_begins_when_no_more_than_six_collectives_before_it_have_not(count: int, held_us: float) -> None:
    """They take 10 each, one behind the other: at 10 the second of eight begins, and six are left."""
    program = many(count, "g0")
    recorded = simulate(program, replace(costs_of(program), most_pending=6))
    assert start_us(recorded, "first") == held_us
    assert start_us(simulate(program, costs_of(program)), "first") == 0.0, "without a limit"
    assert recorded.step_us == 10.0 * count + 5.0
    assert sum(recorded.blocked_us.values()) == 10.0 * count - held_us - 5.0, "of waits alone"


def test_only_graphs_that_are_recorded_are_held_up() -> None:
    program, machine = many(8, "g0"), load_hardware("h200")
    assert price(program, machine.replaying()).most_pending == 6
    assert price(program, machine).most_pending is None


def test_collectives_of_all_communicators_count() -> None:
    """Two begin at once, and two more at 10: of ten that were launched, six have not begun from then on."""
    program = many(10, "g0", "g1")
    assert start_us(simulate(program, replace(costs_of(program), most_pending=6)), "first") == 10.0


def test_copy_engines_hold_nothing_up() -> None:
    program = many(10, "g0")
    lanes = {op.name: COPY_ENGINE for op in program.launches}
    assert start_us(simulate(program, replace(costs_of(program), most_pending=6, lanes=lanes)), "first") == 0.0


def test_a_runtime_that_starts_what_has_its_data_holds_nothing_up() -> None:
    program = many(10, "g0")
    ideal = simulate(program, replace(costs_of(program), most_pending=6), launch_after="data")
    assert start_us(ideal, "first") == 0.0


def test_compute_that_is_issued_after_it_was_let_past_starts_then() -> None:
    """The CPU takes 100 for the last of eight launches, when the first seven have long begun."""
    program = many(8, "g0")
    late = simulate(program, replace(costs_of(program, ag7=100.0), most_pending=6))
    assert start_us(late, "first") == 100.0


PROGRAMS = st.one_of(fsdp_programs(), st.builds(many, st.integers(8, 16), st.just("g0"), st.sampled_from(("g0", "g1"))))


@given(drawn=priced(PROGRAMS), draws=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_the_bound_holds_for_recorded_graphs(drawn: tuple[Program, CostTable], draws: random.Random) -> None:
    program, costs = drawn[0], replace(drawn[1], recorded=True, most_pending=6)
    dag = build_dag(program)
    result = simulate(program, costs, random_order(dag, draws))
    assert result.step_us >= lower_bound(dag, costs, fixed=()).step_us * (1 - 1e-9)
    assert result.step_us == pytest.approx(result.compute_us + result.exposed_us + result.idle_us)
