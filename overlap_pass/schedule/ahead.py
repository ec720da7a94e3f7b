"""Which gathers of a forward are launched before it: at the end of the step before, beside the optimizer.

The first gathers of a forward have no compute in front of them to hide under. The optimizer of the step before is compute, and
touches no communication::

    in the graph      optimizer ████████   forward ▒▒▒░░███████
    across the edge   optimizer ██▒▒▒▒██   forward ███████            ▒ gathers, ░ nothing

Those launched ahead are the first of the order, as many as fit: ranks then launch in the same order as without, however many
each takes ahead. They may hold one FSDP unit, as prefetching does (256 MiB at least), and no more than the memory budget
leaves. Both are counted as if they were launched before the first op of the graph, which is where they are still held from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.graph.program import OpKind, Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.agreement import allowance
from overlap_pass.simulate.engine import simulate
from overlap_pass.units import format_bytes, format_us

__all__ = ["Ahead", "launched_ahead"]

_SHOWN = 3
"""Names of parameters in a summary."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The gathers that a forward expects to be under way.

    Attributes:
        launches: their names, in the order of the plan.
        parameters: what they gather.
        held_bytes: of gathered parameters, from the end of one step into the next.
        takes_us: how long the communicator that is busy longest has to do with them: an optimizer that takes as long hides them.
        saved_us: how much shorter the graph is where an optimizer does, by the simulation.
    """

    launches: tuple[str, ...]
    parameters: tuple[str, ...]
    held_bytes: int
    takes_us: float
    saved_us: float

    def summary(self) -> str:
        """For a log or a report."""
        more = len(self.parameters) - _SHOWN
        names = ", ".join(self.parameters[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return (
            f"gathered across the step's edge: {names} ({format_bytes(self.held_bytes)} held through the optimizer): saves "
            f"{format_us(self.saved_us)} a step where what is updated behind them takes {format_us(self.takes_us)} or more "
            "(predicted)"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def launched_ahead(
    program: Program, hardware: Hardware, order: Sequence[str], possible: Sequence[str], budget_bytes: int | None
) -> Ahead | None:
    """The gathers that are launched ahead of a forward; ``None`` for none.

    Args:
        program: a forward, with launches joined as planned.
        order: the planned one.
        possible: the first launches of that order, as far as each could be ahead.
        budget_bytes: bound on the peak of the graph, ``None`` for none.
    """
    left_bytes, chosen = allowance(program), 0
    for name in possible:
        left_bytes -= _bytes(program, name)
        if left_bytes < 0 or not _fits(program, _ahead_of_all(program, order, possible[: chosen + 1]), budget_bytes):
            break
        chosen += 1
    if not chosen:
        return None
    launches, costs = tuple(possible[:chosen]), price(program, hardware)
    before_us = simulate(program, costs, order).step_us
    after_us = simulate(program, _without(program, costs, launches), order).step_us
    return Ahead(
        launches,
        tuple(_served(program, name) for name in launches),
        sum(_bytes(program, name) for name in launches),
        _takes_us(program, hardware, launches),
        max(0.0, before_us - after_us),
    )


def _fits(program: Program, order: Sequence[str], budget_bytes: int | None) -> bool:
    return budget_bytes is None or peak(program, order).peak_bytes <= budget_bytes


def _ahead_of_all(program: Program, order: Sequence[str], ahead: Sequence[str]) -> list[str]:
    """The order with some launches, and what they are made of, moved to its front."""
    front = _made_for(program, ahead).union(ahead)
    inputs = [name for name in order if program.op(name).kind is OpKind.INPUT]
    moved = [name for name in order if name in front]
    rest = [name for name in order if name not in front and program.op(name).kind is not OpKind.INPUT]
    return [*inputs, *moved, *rest]


def _made_for(program: Program, launches: Sequence[str]) -> set[str]:
    """Casts and pads that launches send, down to the inputs of the graph."""
    found: set[str] = set()
    todo = [name for launch in launches for name in program.op(launch).inputs]
    while todo:
        op = program.op(todo.pop())
        if op.kind is not OpKind.INPUT and op.name not in found:
            found.add(op.name)
            todo += op.inputs
    return found


def _without(program: Program, costs: CostTable, launches: Sequence[str]) -> CostTable:
    """Prices of the graph when the launches, and casts for them alone, were done before it."""
    gone = set(launches)
    for name in sorted(_made_for(program, launches), key=lambda name: -program.index[name]):
        if all(program.ops[reader].name in gone for reader in program.readers[program.index[name]]):
            gone.add(name)
    nothing = dict.fromkeys(gone, 0.0)
    kernels = {name: time_us for name, time_us in costs.kernel_us.items() if name not in gone}
    return replace(
        costs,
        duration_us={**costs.duration_us, **nothing},
        launch_us={**costs.launch_us, **nothing},
        kernel_us=kernels,
    )


def _takes_us(program: Program, hardware: Hardware, launches: Sequence[str]) -> float:
    """On the communicators, which carry what is ahead even where copy engines carry the rest."""
    lanes: dict[str, float] = {}
    for name in launches:
        collective = program.op(name).collective
        if collective is not None:
            alone_us = collective_us(replace(collective, by_copy=False), hardware)
            lanes[collective.group] = lanes.get(collective.group, 0.0) + alone_us
    return max(lanes.values(), default=0.0)


def _served(program: Program, name: str) -> str:
    collective = program.op(name).collective
    return name if collective is None else collective.parameter or collective.unit or name


def _bytes(program: Program, name: str) -> int:
    collective = program.op(name).collective
    return 0 if collective is None else collective.payload_bytes
