"""What a search leaves out would not have won: the pruned one beside one that looks at everything, on random graphs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpKind, Program
from overlap_pass.schedule.choice import _ASKED_VARIANTS, _Bench
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies import latest_start
from overlap_pass.schedule.strategies.fill_gaps import FillGaps
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Problem
from overlap_pass.schedule.variants import Variant
from tests.pure.programs import Builder, priced, prices, random_order

_LEFT_ON_THE_TABLE = 1.01
"""Times the best of all candidates, at most: a search ends next to the bound, and ways to order compute are told apart by less."""


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_candidates_that_are_not_made_would_not_have_won(data) -> None:
    program, costs = data.draw(priced())
    dag = build_dag(program)
    smallest_bytes = Room.of(Placement(dag)).smallest_bytes
    budget_bytes = data.draw(st.none() | st.integers(0, 64).map(lambda more: smallest_bytes + more))
    problem = Problem(dag, costs, budget_bytes)
    order, _ = LatestStart().before_tail(problem)
    score = Score(problem)
    assert score.fits(score.peak_bytes(order))
    fitting = (made for made in _all_candidates(problem, score) if score.fits(score.peak_bytes(made)))
    assert score.of(order) <= min(map(score.of, fitting)) * _LEFT_ON_THE_TABLE


def _all_candidates(problem: Problem, score: Score) -> Iterator[tuple[int, ...]]:
    """Everything that the strategy knows to make, without a look at what it scores."""
    ladder = problem.once(latest_start._Ladder)
    for rung in (*latest_start._FIRST, latest_start._EARLY, *ladder.best(latest_start._MARGINS)):
        free = ladder.free(rung)
        yield free if score.fits(score.peak_bytes(free)) else ladder.within(rung, score)
    yield from (order for _, order in problem.once(latest_start._eager_orders))
    yield Room.shared(problem).order


@given(priced(), st.integers(0, 64))
@settings(max_examples=80, deadline=None)
def test_moving_compute_is_no_worse_than_leaving_it(made, more_bytes: int) -> None:
    """Ways to order compute that are passed over by what they score without a budget leave the best one in."""
    program, costs = made
    dag = build_dag(program)
    problem = Problem(dag, costs, Room.of(Placement(dag)).smallest_bytes + more_bytes)
    score = Score(problem)
    moved, kept = (
        score.of([program.index[name] for name in strategy.schedule(problem).order])
        for strategy in (FillGaps(), LatestStart())
    )
    assert moved <= kept * _LEFT_ON_THE_TABLE


@given(priced(), st.lists(st.tuples(st.integers(0, 2), st.floats(0.5, 1.5)), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_score_below_a_limit_is_the_score_whatever_was_asked_before(made, asked: list[tuple[int, float]]) -> None:
    program, costs = made
    problem = Problem(build_dag(program), costs, None)
    names = [random_order(problem.dag, random.Random(seed)) for seed in range(3)]
    orders = [tuple(program.index[name] for name in order) for order in names]
    known = [Score(Problem(problem.dag, costs, None)).of(order) for order in orders]
    score = Score(problem)
    for number, share in asked:
        limit_us = known[number] * share
        assert score.below(orders[number], limit_us) == (known[number] if known[number] <= limit_us else math.inf)


@given(priced(), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_no_order_scores_less_than_the_floor(made, seed: int) -> None:
    program, costs = made
    problem = Problem(build_dag(program), costs, None)
    order = [program.index[name] for name in random_order(problem.dag, random.Random(seed))]
    assert Score(problem).of(order) >= Score(problem).floor_us * (1 - 1e-9)


@given(priced(), st.lists(st.sampled_from((0.2, 0.5, 1.0, 2.0, 5.0)), min_size=3, max_size=5))
@settings(max_examples=60, deadline=None)
def test_ways_of_joining_that_are_not_looked_at_are_not_among_the_best(made, paces: list[float]) -> None:
    """Ways of joining differ in what communication takes; here in nothing else."""
    program, costs = made
    found = [Variant((), Problem(build_dag(program), _with_pace(program, costs, pace), None), 0.0) for pace in paces]
    everything = sorted(range(len(found)), key=lambda place: LatestStart().promise_us(found[place].problem))
    looked_at = _Bench(LatestStart()).promising(found)
    assert [id(way) for way in looked_at] == [id(found[place]) for place in everything[:_ASKED_VARIANTS]]


def _with_pace(program: Program, costs: CostTable, pace: float) -> CostTable:
    slower = {op.name: costs.duration_us[op.name] * pace for op in program.launches}
    return replace(costs, duration_us={**costs.duration_us, **slower})


@pytest.mark.parametrize("short_bytes", [0, 1])
def test_below_the_least_memory_no_order_is_made(short_bytes: int) -> None:
    """Every pass adds to the order of least memory; where that keeps the budget, some are made for it."""
    build = Builder()
    shards = [build.input(f"shard{layer}", 50, held=True) for layer in range(3)]
    value = build.input("x", 10, held=True)
    for layer, shard in enumerate(shards):
        weight = build.wait(f"weight{layer}", build.all_gather(f"gather{layer}", shard, 100))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=10)
    program = build.output(value)
    costs = prices(program, {op.name: 10.0 for op in program.ops if op.kind in (OpKind.COMPUTE, OpKind.LAUNCH)})
    problem = Problem(build_dag(program), costs, None)
    smallest_bytes = Room.shared(problem).smallest_bytes
    order, _ = LatestStart().before_tail(replace(problem, budget_bytes=smallest_bytes - short_bytes))
    made_for = {budget_bytes for _, budget_bytes in problem.once(latest_start._Ladder)._made}
    assert made_for == ({None} if short_bytes else {None, smallest_bytes})
    assert Score(problem).peak_bytes(order) == smallest_bytes
