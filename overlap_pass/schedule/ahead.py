"""Which gathers of a forward are launched before it: at the end of the step before, beside the optimizer.

The first gathers of a forward have no compute in front of them to hide under. The optimizer of the step before is compute, and
touches no communication::

    in the graph      optimizer ████████   forward ▒▒▒░░███████
    across the edge   optimizer ██▒▒▒▒██   forward ███████            ▒ gathers, ░ nothing

Those launched ahead are the first of the order, so that ranks launch in the same order however many each takes ahead. How
many is settled by

- *gain*: what the forward gets shorter, less what the optimizer gets longer because gathers run beside it. Where launches are
  agreed on, that is the least of what it is in steps that all ranks share (``schedule.agreement``), else that at this rank's
  prices;
- *memory*: through the optimizer they are held, with what was sent, beside shards and all gradients, which is what the end of a
  backward holds; so they may take what the budget adds to that. In the forward they count from before its first op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.graph.program import Category, CollectiveKind, OpKind, Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.agreement import COMPUTE_PER_TRAFFIC, reference_compute_us, reference_costs
from overlap_pass.schedule.early import launch_at_once
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.simulate.engine import simulate
from overlap_pass.units import format_bytes, format_us

__all__ = ["Ahead", "Room", "launched_ahead"]

_SHOWN = 3
"""Names of parameters in a summary."""
_WORTH = 0.05
"""Of the time that gathers take: what does not save as much is not worth its memory."""
_FRUITLESS = 4
"""So many more are looked at behind the best number of them."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """The gathers that a forward expects to be under way.

    Attributes:
        launches: their names, in the order of the plan.
        parameters: what they gather.
        held_bytes: of gathered parameters, from the end of one step into the next.
        takes_us: how long they take beside compute, on the communicator that is busy longest: an optimizer that takes as long
            hides them.
        saved_us: how much shorter the step is where an optimizer does: the simulated graph, less what they cost the optimizer; what
            all ranks agree on may be worth nothing on this one.
    """

    launches: tuple[str, ...]
    parameters: tuple[str, ...]
    held_bytes: int
    takes_us: float
    saved_us: float

    def summary(self) -> str:
        """For a log or a report."""
        more = len(self.parameters) - _SHOWN
        saved = format_us(self.saved_us) if self.saved_us > 0 else "nothing"
        names = ", ".join(self.parameters[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return (
            f"gathered across the step's edge: {names} ({format_bytes(self.held_bytes)} held through the optimizer): saves "
            f"{saved} a step where what is updated behind them takes {format_us(self.takes_us)} or more "
            "(predicted)"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Room:
    """What bounds the memory of gathers that are ahead.

    Attributes:
        budget_bytes: bound on the peak of the graph, ``None`` for none.
        extra_bytes: what it adds to the order as written, where that is said; alike on all ranks.
    """

    budget_bytes: int | None
    extra_bytes: int | None

    def allows(self, program: Program, order: Sequence[str], ahead: Sequence[str]) -> bool:
        """Whether the launches ``ahead`` may be made before all else in an order."""
        if self.budget_bytes is None:
            return True
        held_bytes = sum(_with_sent_bytes(program, name) for name in ahead)
        left_bytes = self.extra_bytes
        if left_bytes is None:  # gradients are as large as the shards that the graph holds
            left_bytes = self.budget_bytes - 2 * sum(storage.size_bytes for storage in program.storages if storage.held)
        return held_bytes <= left_bytes and (
            peak(program, _moved_first(program, order, ahead)).peak_bytes <= self.budget_bytes
        )


def launched_ahead(
    program: Program,
    hardware: Hardware,
    order: Sequence[str],
    possible: Sequence[str],
    room: Room,
    *,
    alike: bool = True,
) -> Ahead | None:
    """The gathers that are launched ahead of a forward; ``None`` for none.

    Args:
        program: a forward, with launches joined as planned.
        order: the planned one.
        possible: the first launches of that order, as far as each could be ahead.
        alike: how many is not to depend on what ranks may see differently, but for their memory.
    """
    costs = price(program, hardware)
    steps = _steps_alike(program, costs, order) if alike else [_Step(program, costs, order)]
    best_us = best_takes_us = 0.0
    chosen = 0
    for count in range(1, len(possible) + 1):
        if count > chosen + _FRUITLESS or not room.allows(program, order, possible[:count]):
            break
        ahead = possible[:count]
        gain_us = min(step.saved_us(ahead) for step in steps) - _costs_us(program, hardware, ahead)
        takes_us = _takes_us(program, hardware, ahead)
        if gain_us - best_us > _WORTH * (takes_us - best_takes_us):
            best_us, best_takes_us, chosen = gain_us, takes_us, count
    if not chosen:
        return None
    launches = tuple(possible[:chosen])
    with_host_ahead = replace(costs, cpu_ahead_us=sum(costs.launch_us[name] for name in launches))
    return Ahead(
        launches,
        tuple(_served(program, name) for name in launches),
        sum(_bytes(program, name) for name in launches),
        _takes_us(program, hardware, launches),
        _Step(program, with_host_ahead, order).saved_us(launches) - _costs_us(program, hardware, launches),
    )


@dataclass(frozen=True)
class _Step:
    """An order at some prices."""

    program: Program
    costs: CostTable
    order: Sequence[str]

    @cached_property
    def step_us(self) -> float:
        return simulate(self.program, self.costs, self.order).step_us

    def saved_us(self, ahead: Sequence[str]) -> float:
        """How much shorter it is where some launches were made before it."""
        without = _without(self.costs, ahead)
        return self.step_us - simulate(self.program, without, self.order).step_us


def _steps_alike(program: Program, costs: CostTable, order: Sequence[str]) -> list[_Step]:
    """Steps of the order of launches that no rank sees differently; the host is ahead, from the step before.

    There, ops compute for as long as what they read travels. Looking up rows of an embedding does not, and comes first.
    """
    ordered = replace(program, ops=tuple(map(program.op, order)), launches_fixed=True)
    placement = Placement.of_program(ordered)
    names = [ordered.ops[position].name for position in place(placement, launch_at_once(placement))]
    travel_us = {
        name: time_us
        for name, time_us in reference_compute_us(ordered, costs).items()
        if ordered.op(name).category is not Category.INDEX
    }
    costs = replace(costs, launch_us=dict.fromkeys(costs.launch_us, 0.0))
    computing = ({name: ratio * time_us for name, time_us in travel_us.items()} for ratio in COMPUTE_PER_TRAFFIC)
    tables = (reference_costs(ordered, costs, compute_us) for compute_us in computing)
    # All is launched before compute begins, so no collective has to look for a place between kernels; and none holds compute up,
    # as a plan does not launch them all at once.
    free = (replace(table, starts_between_kernels=False, most_pending=None) for table in tables)
    return [_Step(ordered, table, names) for table in free]


def _moved_first(program: Program, order: Sequence[str], ahead: Sequence[str]) -> list[str]:
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


def _without(costs: CostTable, launches: Sequence[str]) -> CostTable:
    """Prices of the graph when the launches were made before it. The host calls an operator still; casts are made either way, at
    the edge or in the graph."""
    kernels = {name: time_us for name, time_us in costs.kernel_us.items() if name not in launches}
    return replace(costs, duration_us={**costs.duration_us, **dict.fromkeys(launches, 0.0)}, kernel_us=kernels)


def _takes_us(program: Program, hardware: Hardware, launches: Sequence[str]) -> float:
    """Of the communicator that is busy longest: those carry what is ahead even where copy engines carry the rest."""
    lanes: dict[str, float] = defaultdict(float)
    beside = hardware.contention_of(CollectiveKind.ALL_GATHER).communication_beside_compute
    for name in launches:
        collective = program.op(name).collective
        if collective is not None:
            lanes[collective.group] += collective_us(replace(collective, by_copy=False), hardware) * beside
    return max(lanes.values(), default=0.0)


def _costs_us(program: Program, hardware: Hardware, launches: Sequence[str]) -> float:
    """How much longer an optimizer takes that they run beside."""
    beside = hardware.contention_of(CollectiveKind.ALL_GATHER).compute_beside_communication
    return _takes_us(program, hardware, launches) * (1.0 - 1.0 / beside)


def _served(program: Program, name: str) -> str:
    collective = program.op(name).collective
    return name if collective is None else collective.parameter or collective.unit or name


def _bytes(program: Program, name: str) -> int:
    collective = program.op(name).collective
    return 0 if collective is None else collective.payload_bytes


def _with_sent_bytes(program: Program, name: str) -> int:
    collective = program.op(name).collective
    return 0 if collective is None else collective.payload_bytes + collective.payload_bytes // collective.group_size
