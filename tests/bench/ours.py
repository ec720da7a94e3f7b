"""One plan of ours and the CPU seconds that it took, from a graph of which nothing is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import Program
from overlap_pass.memory.budget import Fsdp2
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.alike import Terms, choose_alike
from overlap_pass.schedule.choice import Choice, choose
from overlap_pass.schedule.collection import collection_put_off
from overlap_pass.schedule.types import Problem, Strategy
from overlap_pass.schedule.variants import variants

__all__ = ["Planned", "agreed", "priced"]

Prices = Callable[[Program], CostTable]


@dataclass(frozen=True)
class Planned:
    """An order and the problem that it solves.

    Attributes:
        planning_s: CPU seconds from the graph to the order.
        reading_s: those of them that went into reading the graph.
    """

    problem: Problem
    order: tuple[str, ...]
    planning_s: float
    reading_s: float


def priced(
    read: Callable[[], Program], price: Prices, strategy: Strategy, budget_bytes: int, *, joined: bool
) -> Planned:
    """The order for this rank's prices and memory, as with ``launch_order="priced"``.

    Args:
        read: gives the graph, with nothing kept of another plan.
        joined: whether launches may become one.
    """
    return _timed(read, lambda program: choose(variants(program, price, None if joined else 0), strategy, budget_bytes))


def agreed(read: Callable[[], Program], price: Prices, strategy: Strategy) -> Planned:
    """The order that launches alike on all ranks, within ``fsdp2``'s memory: the backend's default."""

    def plan(program: Program) -> Choice:
        budget = Fsdp2()
        budget_bytes = budget.resolve(program, peak(program).peak_bytes)
        return choose_alike(variants(program, price), Terms(strategy, budget, budget_bytes), price)

    return _timed(read, plan)


def _timed(read: Callable[[], Program], plan: Callable[[Program], Choice]) -> Planned:
    began_s = time.process_time()
    with collection_put_off():  # as make_plan does
        program = read()
        read_s = time.process_time()
        chosen = plan(program)
    planned_s = time.process_time()
    return Planned(chosen.variant.problem, chosen.schedule.order, planned_s - began_s, read_s - began_s)
