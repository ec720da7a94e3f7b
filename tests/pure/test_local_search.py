"""``local_search``: never worse than its start, better where a move is all it takes, the same on every run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.errors import OptionError
from overlap_pass.graph.dag import build_dag
from overlap_pass.memory.ledger import peak
from overlap_pass.registry import parse
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies import LocalSearch
from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, priced, prices

STARTS = ("as_written", "backward_post", "backward_pre", "greedy", "latest_start")


@pytest.mark.parametrize("start", STARTS)
@given(data=st.data())
@settings(max_examples=20)
def test_it_is_never_worse_than_its_start_and_holds_no_more_where_that_fits(start, data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, data.draw(st.none() | st.integers(0, 150)))
    before = parse(start).schedule(problem).order
    after = LocalSearch(start=start, evaluations=15).schedule(problem).order
    assert _score_us(problem, after) <= _score_us(problem, before)
    assert peak(program, after).peak_bytes <= max(peak(program, before).peak_bytes, problem.budget_bytes or 10**9)


def test_no_evaluations_give_the_start() -> None:
    program, problem = _serial()
    assert LocalSearch(start="as_written", evaluations=0).schedule(problem).order == program.order


def test_it_hides_gathers_that_were_written_where_they_are_used() -> None:
    """Six layers of 10 µs with gathers of 8 µs: serial 108 µs, all but the first gather hidden 68 µs."""
    program, problem = _serial()
    assert simulate(program, problem.costs).step_us == pytest.approx(108)
    order = LocalSearch(start="as_written", evaluations=60).schedule(problem).order
    assert simulate(program, problem.costs, order).step_us == pytest.approx(68)


def test_more_evaluations_are_never_worse() -> None:
    _, problem = _serial()
    scores = [
        _score_us(problem, LocalSearch(start="as_written", evaluations=count).schedule(problem).order)
        for count in (0, 2, 5, 10, 40)
    ]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("text", ["local_search{start=latest}", "local_search{evaluations=-1}"])
def test_options_out_of_range_are_refused(text) -> None:
    with pytest.raises(OptionError, match="local_search"):
        parse(text)


def _serial():
    build = Builder()
    value = build.input("x", 10, held=True)
    for layer in range(6):
        shard = build.input(f"shard{layer}", 50, held=True)
        weight = build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, 100))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=10)
    program = build.output(value)
    times = {op.name: 8.0 for op in program.launches} | {f"mm{layer}": 10.0 for layer in range(6)}
    return program, Problem(build_dag(program), prices(program, times), None)


def _score_us(problem: Problem, order: tuple[str, ...]) -> float:
    return Score(problem).of([problem.program.index[name] for name in order])
