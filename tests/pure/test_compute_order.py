"""Other orders of compute, and what they share with the order as written."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlap_pass.graph.dag import build_dag
from overlap_pass.memory.ledger import Lifetimes
from overlap_pass.schedule.compute_order import ComputeOrders, Filling
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.types import Problem
from overlap_pass.schedule.verify import violations
from tests.pure.programs import priced, random_order

FILLINGS = st.builds(
    Filling, st.sampled_from((0.5, 4.0, 40.0)), st.none() | st.integers(0, 60), st.sampled_from((0.0, 9.0))
)


@given(priced(), st.integers(0, 99))
@settings(max_examples=40)
def test_a_reordered_problem_is_that_of_the_program_written_so(made, seed: int) -> None:
    program, costs = made
    names = random_order(build_dag(program), random.Random(seed))
    assume(not violations(program, names))
    order = tuple(program.index[name] for name in names)
    written = replace(program, ops=tuple(program.ops[position] for position in order))
    moved = Problem(build_dag(program), costs, None).reordered(order)
    fresh = Problem(build_dag(written), costs, None)
    assert moved.program == written
    assert moved.dag.predecessors == fresh.dag.predecessors
    assert moved.dag.successors == fresh.dag.successors
    assert Placement(build_dag(program)).of_order(moved.dag, order).free == Placement(fresh.dag).free
    straight = range(len(order))
    assert Score(moved).peak_bytes(straight) == Lifetimes(written).peak_bytes(straight)
    assert Score(moved).of(straight) == Score(fresh).of(straight)


@given(priced(), FILLINGS)
@settings(max_examples=60)
def test_an_order_of_compute_is_legal_and_does_not_depend_on_what_was_asked_before(made, filling: Filling) -> None:
    program, costs = made
    problem = Problem(build_dag(program), costs, None)
    asked_often = ComputeOrders(problem)
    for limit_bytes in (None, 10, 200):
        asked_often.filled(replace(filling, limit_bytes=limit_bytes))
    found = asked_often.filled(filling)
    assert violations(program, tuple(program.ops[position].name for position in found.order)) == ()
    assert (found.order, found.end_us) == _made_anew(problem, filling)


def _made_anew(problem: Problem, filling: Filling) -> tuple[tuple[int, ...], float]:
    """Under a limit that is asked for in the run itself, not told from the run without one."""
    made = ComputeOrders(problem)._made(filling)
    return made.order, made.end_us
