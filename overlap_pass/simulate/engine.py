"""The simulator: what a CUDA device makes of one order of ops.

The lanes and their rules:

- **CPU**: issues the ops in order; each takes its ``launch_us``. It never waits for the device, and begins
  ``costs.cpu_ahead_us`` before it.
- **compute**: runs what was issued to it in order, one op at a time. A wait in it lets nothing past until its
  collective has ended.
- **one per communicator** (and one per copy engine that sends in its stead): runs its collectives in the order
  issued, one at a time. A collective may start once everything issued to the compute lane before it has finished (the
  event recorded at its launch). Where ``costs.starts_between_kernels``, one that becomes ready while a compute op runs
  has to wait until that op ends: the op's kernel holds all multiprocessors, also those that an earlier collective gives
  back meanwhile. It then comes before the next op. So a launch just before an op does not hide under that op, and every
  collective costs a boundary between kernels.

A recorded graph differs in two ways. An op that waited for a collective starts before the collective behind it
(``costs.recorded``). And compute is held up behind a launch until all but the last few collectives before it have begun
(``costs.most_pending``): what cannot begin yet lies in one of the few queues that a process has to the device. Copies are not
counted.

Lanes that run at the same time slow each other down by :class:`~overlap_pass.cost.contention.Contention`: each item
makes progress at 1/factor, and factors change only when something starts or ends. Compute beside several
collectives at once takes the largest of their factors. Between two such events all ends are
known, so the simulation goes from event to event: time linear in ops times lanes.

    CPU      |a|L|b|w|c
    compute    aaa bbbbb·····ccc        · the wait w blocks the lane
    g0             LLLLLLLLLL           L starts when a is done
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import OpNode, Program
from overlap_pass.simulate.device import Device
from overlap_pass.simulate.queues import Issuer, LaunchAfter, Queues
from overlap_pass.simulate.recurrence import Recurrence
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.units import us_to_ns

__all__ = ["LaunchAfter", "Simulation", "Simulator", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """What one order takes. ``step_us = compute_us + exposed_us + idle_us``.

    Attributes:
        timeline: the spans of all lanes but the CPU; nothing for ops that take no time on the device.
        step_us: from the first issue to the last end.
        compute_us: time while the compute lane runs an op, contention included.
        communication_us: time while any collective runs, contention included.
        exposed_us: time while a collective and no compute runs.
        cpu_us: when the CPU has issued everything.
        blocked_us: launch → how long its waits held the compute lane.
    """

    timeline: Timeline
    step_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    cpu_us: float
    blocked_us: Mapping[str, float]

    @property
    def idle_us(self) -> float:
        """Time while neither compute nor a collective runs: the CPU was late."""
        return self.step_us - self.compute_us - self.exposed_us


def simulate(
    program: Program,
    costs: CostTable,
    order: Sequence[str] | None = None,
    *,
    label: str = "",
    launch_after: LaunchAfter = "issue",
) -> Simulation:
    """Run ``order`` (default: as written) through the lanes.

    Args:
        program: the graph.
        costs: prices and contention.
        order: op names, each once.
        label: the timeline's name.
        launch_after: ``"issue"`` for CUDA's rule above; ``"data"`` lets a collective start as soon as its inputs
            exist, as an idealised runtime could.

    Raises:
        IllegalSchedule: a wait comes before its launch.
    """
    positions = None if order is None else [program.index[name] for name in order]
    return Simulator(program, costs, launch_after=launch_after).run(positions, label)


class Simulator:
    """One program and its prices, to run many orders of it; an order names ops by position, ``None`` is as written."""

    def __init__(self, program: Program, costs: CostTable, *, launch_after: LaunchAfter = "issue") -> None:
        self._issuer, self._ops, self._costs = Issuer(program, costs, launch_after), program.ops, costs
        self._issued: tuple[tuple[int, ...], Queues] | None = None
        plain = launch_after == "issue" and Recurrence.holds(program, costs)
        self._recurrence = Recurrence(program, costs) if plain else None

    def run(self, order: Sequence[int] | None = None, label: str = "") -> Simulation:
        """The whole result."""
        return _summary(self._ops, *self._ran(order), label)

    def step_us(self, order: Sequence[int] | None = None, limit_us: float = math.inf, *, stretch: float = 1.0) -> float:
        """The step alone, in less time; infinite, in still less, where it is longer than a limit.

        Args:
            stretch: every collective takes that many times its price.
        """
        if self._recurrence is not None:
            step_us, _ = self._recurrence.walk(order, stretch=stretch)
        else:
            queues, device = self._ran(order, limit_us, stretch)
            step_us = max(device.now, queues.cpu_us)
        return step_us if step_us <= limit_us else math.inf

    def blocked_us(self, order: Sequence[int] | None = None) -> Mapping[str, float]:
        """Launch → how long its waits hold the compute lane."""
        if self._recurrence is not None:
            _, found = self._recurrence.walk(order)
            return {
                op.name: found.get(position, 0.0) for position, op in enumerate(self._ops) if op.collective is not None
            }
        return _blocked_us(self._ran(order)[0])

    def _ran(
        self, order: Sequence[int] | None, limit_us: float = math.inf, stretch: float = 1.0
    ) -> tuple[Queues, Device]:
        if self._issued is not None and self._issued[0] is order:  # as before, at other prices
            queues = self._issued[1]
        else:
            queues = self._issuer.issue(order)
            self._issued = (order, queues) if isinstance(order, tuple) else None
        device = Device(queues, self._costs, stretch)
        device.run(limit_us)
        return queues, device


def _summary(ops: Sequence[OpNode], queues: Queues, device: Device, label: str) -> Simulation:
    step_us = max(device.now, queues.cpu_us)
    spans = [
        _span(ops[position], "compute", SpanKind.COMPUTE, device.starts_us[entry], device.ends_us[entry])
        for entry, position in queues.compute.positions().items()
    ]
    tensors = Counter(op.launch for op in ops)
    for lane, items in queues.collectives.items():
        for item in items:
            span = _span(item.op, lane, SpanKind.COMMUNICATION, item.start_us, item.end_us)
            spans.append(replace(span, parts=_parts(item.op, tensors[item.op.name])))
    visible = sorted((s for s in spans if s.end_ns > s.start_ns), key=lambda s: (s.start_ns, s.lane, s.name))
    return Simulation(
        timeline=Timeline(label, us_to_ns(step_us), tuple(visible), predicted=True),
        step_us=step_us,
        compute_us=device.compute_us,
        communication_us=device.communication_us,
        exposed_us=device.exposed_us,
        cpu_us=queues.cpu_us,
        blocked_us=_blocked_us(queues),
    )


def _blocked_us(queues: Queues) -> dict[str, float]:
    return {item.op.name: item.blocked_us for items in queues.collectives.values() for item in items}


def _span(op: OpNode, lane: str, kind: SpanKind, start_us: float, end_us: float) -> Span:
    start_ns, end_ns, collective = us_to_ns(start_us), us_to_ns(end_us), op.collective
    if collective is None:
        return Span(op.name, kind, lane, start_ns, end_ns)
    # The root module's qualified name is empty, which no reader of a report would understand.
    unit = "(root)" if collective.unit == "" else collective.unit
    return Span(op.name, kind, lane, start_ns, end_ns, collective.kind.value, collective.payload_bytes, unit)


def _parts(op: OpNode, tensors: int) -> int:
    """Kernels or copies that a launch of so many tensors becomes."""
    collective = op.collective
    if collective is None or not tensors:
        return 1
    if collective.by_copy:
        return tensors * (collective.group_size - 1)
    return tensors if collective.direct else 1
