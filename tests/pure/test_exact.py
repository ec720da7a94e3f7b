"""``exact`` finds what trying all orders finds, and the bound is never above it."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlap_pass.errors import EnvironmentRefused, OptionError, PlanError
from overlap_pass.graph.dag import build_dag
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.strategies import Exact, LatestStart
from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.bound import fixed_compute, lower_bound
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, fsdp_programs, legal_orders, prices

MOST_ORDERS = 3000


def chain(layers: int):
    build = Builder()
    value = build.input("x", 10, held=True)
    for layer in range(layers):
        shard = build.input(f"shard{layer}", 50, held=True)
        weight = build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, 100))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=10)
    return build.output(value)


def timed(program, data):
    """Times for launches and for compute that keeps its order; casts and slices take none, as the model has it."""
    fixed = set(fixed_compute(program))
    times = st.integers(0, 9).map(float)
    names = [op.name for op in program.ops if op.collective is not None or op.name in fixed]
    return prices(program, {name: data.draw(times) for name in names})


def test_without_or_tools_the_error_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    program = chain(2)
    with pytest.raises(EnvironmentRefused, match=r"overlap-pass\[exact\]"):
        Exact().schedule(Problem(build_dag(program), prices(program, {}), None))


def test_a_graph_with_too_many_collectives_is_refused_with_what_to_do() -> None:
    program = chain(5)
    with pytest.raises(PlanError, match=r"5 collectives .* largest=4.*local_search"):
        Exact(largest=4).schedule(Problem(build_dag(program), prices(program, {}), None))


@pytest.mark.parametrize("options", [{"effort": 0.0}, {"largest": 0}])
def test_options_out_of_range_are_refused(options) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Exact(**options)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_it_is_as_fast_as_the_best_of_all_orders_and_no_faster_than_the_bound(data) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    program = data.draw(fsdp_programs(max_layers=2))
    costs, dag = timed(program, data), build_dag(program)
    fixed = fixed_compute(program)
    orders = list(itertools.islice(legal_orders(dag, fixed), MOST_ORDERS + 1))
    assume(len(orders) <= MOST_ORDERS)
    best_us = min(simulate(program, costs, order).step_us for order in orders)
    found_us = simulate(program, costs, Exact().schedule(Problem(dag, costs, None)).order).step_us
    assert found_us == pytest.approx(best_us)
    assert lower_bound(dag, costs).step_us <= found_us * (1 + 1e-9)


@given(data=st.data())
@settings(max_examples=40)
def test_it_keeps_a_budget_that_the_tight_order_keeps_and_is_no_faster_than_the_bound(data) -> None:
    pytest.importorskip("ortools.sat.python.cp_model")
    program = data.draw(fsdp_programs(max_layers=4))
    costs, dag = timed(program, data), build_dag(program)
    budget_bytes = peak(program).peak_bytes + data.draw(st.integers(0, 20))
    problem = Problem(dag, costs, budget_bytes)
    order = Exact().schedule(problem).order
    assert peak(program, order).peak_bytes <= budget_bytes or not _tight_fits(problem)
    assert lower_bound(dag, costs).step_us <= simulate(program, costs, order).step_us * (1 + 1e-9)


def _tight_fits(problem: Problem) -> bool:
    from overlap_pass.schedule.room import Room

    room = Room.of(Placement(problem.dag))
    return problem.budget_bytes is None or room.smallest_bytes <= problem.budget_bytes


def test_six_layers_reach_the_bound_that_latest_start_reaches_too() -> None:
    """Gathers of 8 µs under computations of 10 µs: only the first gather is exposed."""
    pytest.importorskip("ortools.sat.python.cp_model")
    program = chain(6)
    times = {op.name: 8.0 for op in program.launches} | {f"mm{layer}": 10.0 for layer in range(6)}
    problem = Problem(build_dag(program), prices(program, times), None)
    for strategy in (Exact(), LatestStart()):
        assert simulate(program, problem.costs, strategy.schedule(problem).order).step_us == pytest.approx(8 + 6 * 10)
