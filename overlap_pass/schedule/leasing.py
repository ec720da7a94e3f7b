"""Whether gathered parameters are put into shared memory: what that costs beyond the graph, and orders chosen by price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Phase, Program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.leases import leased
from overlap_pass.memory.ledger import peak
from overlap_pass.memory.staging import gathers_bytes
from overlap_pass.schedule.choice import Choice
from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.engine import simulate

__all__ = ["leased_if_shorter", "leaves_room", "pays"]

_WORTH = 0.001
"""Of the step: what saves less is not worth its memory."""


_PAYS = 0.05
"""Of the time that copies take: what casts save is that much where two ranks share a parameter (each writes half of it once and not
twice), and next to nothing where eight do. Copies that nothing hides cost more than that when leases hold back launches, or take
memory that others could be launched in."""


def pays(program: Program, costs: CostTable, before: CostTable) -> bool:
    """Whether casts get shorter by enough, compared with the time of the copies behind them; the same on every rank.

    Args:
        program: with leases, and ``costs`` its prices.
        before: prices of its launches without.
    """
    saved_us = sum(before.kernel_us[name] - costs.kernel_us[name] for name in program.leases)
    return saved_us >= _PAYS * sum(costs.duration_us[name] for name in program.leases)


def leaves_room(program: Program, budget: Budget, budget_bytes: int | None) -> bool:
    """Whether the backward behind a forward with leases can be expected to fit beside what that goes on sharing.

    What a backward needs is not known yet. A budget that says what it adds to the order as written adds that to one which gathers
    again what lies there; within another, a backward may hold what the forward does and the gradients, which are as large as
    the shards.
    """
    more_bytes = gathers_bytes(program) - gathers_bytes(program, leases=False)
    if budget_bytes is None or more_bytes <= 0 or program.phase is not Phase.FORWARD:
        return True
    if (extra_bytes := budget.extra_over_written(_gathered_again(program))) is not None:
        return more_bytes <= extra_bytes
    gradients_bytes = sum(storage.size_bytes for storage in program.storages if storage.held)
    return peak(program).peak_bytes + gradients_bytes <= budget_bytes


def _gathered_again(program: Program) -> Program:
    """Of the gathers of a forward those that its backward needs again: products with weights ask for them in both."""
    found = (
        replace(op, collective=replace(op.collective, payload_bytes=program.leases[op.name].final_bytes))
        for op in program.launches
        if op.collective is not None and op.name in program.leases
    )
    return replace(program, ops=tuple(found))


def leased_if_shorter(
    chosen: Choice, price: Callable[[Program], CostTable], budget: Budget, budget_bytes: int | None
) -> Choice:
    """The same order with leases for its gathers by copy, where that makes the step shorter and keeps the budget.

    Args:
        budget_bytes: what ``budget`` leaves for this graph, ``None`` for no bound.
    """
    problem, order = chosen.variant.problem, chosen.schedule.order
    program = leased(replace(problem.program, ops=tuple(map(problem.program.op, order))))
    if not program.leases or not leaves_room(program, budget, budget_bytes):
        return chosen
    if budget_bytes is not None and peak(program).peak_bytes > budget_bytes:
        return chosen
    costs = price(program)
    if not pays(program, costs, problem.costs):
        return chosen
    before_us = simulate(problem.program, problem.costs, order).step_us
    if simulate(program, costs).step_us >= (1 - _WORTH) * before_us:
        return chosen
    return replace(chosen, variant=replace(chosen.variant, problem=Problem(build_dag(program), costs, None)))
