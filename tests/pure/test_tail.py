"""The end of a backward: compute that can wait hides the last reduction."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Phase, Program
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.tail import hide_tail
from overlap_pass.schedule.types import Problem
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, priced, prices


def backward() -> Program:
    """dX, two weight gradients and the gradient of an embedding, which is reduced last.

    dx ─┬─ dw0 ─ rs0    (dw0 and dw1 need dx only)
        ├─ dw1 ─ rs1
        └─ de ── rse
    """
    build = Builder(phase=Phase.BACKWARD)
    dx = build.compute("dx", build.input("tangent", 1), size_bytes=1)
    ends = []
    for name in ("dw0", "dw1", "de"):
        gradient = build.compute(name, dx, size_bytes=4)
        ends.append(build.wait(f"end {name}", build.reduce_scatter(f"reduce {name}", gradient, 4)))
    return build.output(*ends)


COSTS = {"dx": 100.0, "dw0": 100.0, "dw1": 100.0, "de": 10.0, "reduce dw0": 5.0, "reduce dw1": 5.0, "reduce de": 90.0}


def ended(program: Program, *, budget_bytes: int | None = None) -> list[str]:
    problem = Problem(build_dag(program), prices(program, COSTS), budget_bytes)
    order = [program.index[name] for name in AsWritten().schedule(problem).order]
    return [program.ops[position].name for position in hide_tail(problem, order, Score(problem))]


def test_the_last_weight_gradient_moves_behind_the_last_launch() -> None:
    program = backward()
    order = ended(program)
    assert order.index("reduce de") < order.index("dw1") < order.index("end de")
    assert order.index("dw0") < order.index("de")
    costs = prices(program, COSTS)
    before, after = simulate(program, costs).step_us, simulate(program, costs, order).step_us
    # As written all is waited for at once: 310 of compute and 5 + 5 + 90 exposed; behind it, 90 run beside dw1's 100.
    assert (before, after) == (410.0, 320.0)


def test_nothing_moves_where_the_budget_does_not_allow_it() -> None:
    problem_peak = Score(Problem(build_dag(backward()), prices(backward(), COSTS), None))
    tight_bytes = problem_peak.peak_bytes(range(len(backward().ops))) - 1
    assert ended(backward(), budget_bytes=tight_bytes) == list(backward().order)


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_the_end_is_legal_within_the_budget_and_never_worse(data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, None)
    order = tuple(range(len(program.ops)))
    budget_bytes = Score(problem).peak_bytes(order) + data.draw(st.integers(0, 32))
    problem = replace(problem, budget_bytes=budget_bytes)
    score = Score(problem)
    found = hide_tail(problem, order, score)
    names = tuple(program.ops[position].name for position in found)
    assert violations(program, names) == ()
    assert score.of(found) <= score.of(order)
    assert score.peak_bytes(found) <= budget_bytes
