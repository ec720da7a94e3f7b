"""The simulator: what a CUDA device makes of one order of ops.

The lanes and their rules:

- **CPU**: issues the ops in order; each takes its ``launch_us``. It never waits for the device.
- **compute**: runs what was issued to it in order, one op at a time. A wait in it lets nothing past until its
  collective has ended.
- **one per communicator** (and one per copy engine that sends in its stead): runs its collectives in the order
  issued, one at a time. A collective may start once everything issued to the compute lane before it has finished (the
  event recorded at its launch). Where ``costs.starts_between_kernels``, one that becomes ready while a compute op runs
  has to wait until that op ends: the op's kernel holds all multiprocessors, also those that an earlier collective gives
  back meanwhile. It then comes before the next op. So a launch just before an op does not hide under that op, and every
  collective costs a boundary between kernels.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.model import CostTable
from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.program import OpKind, OpNode, Program
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.units import us_to_ns

__all__ = ["LaunchAfter", "Simulation", "Simulator", "simulate"]

LaunchAfter = Literal["issue", "data"]

_NONE = Contention()


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
    return Simulator(program, costs, launch_after=launch_after).run(order, label)


class Simulator:
    """One program and its prices, to run many orders of it; the arguments are those of :func:`simulate`."""

    def __init__(self, program: Program, costs: CostTable, *, launch_after: LaunchAfter = "issue") -> None:
        self._program, self._costs, self._launch_after = program, costs, launch_after

    def run(self, order: Sequence[str] | None = None, label: str = "") -> Simulation:
        """The whole result."""
        queues = self._issue(order)
        device = _Device(queues, self._costs)
        device.run()
        return _summary(queues, device, label)

    def step_us(self, order: Sequence[str] | None = None) -> float:
        """The step alone, in less time."""
        queues = self._issue(order)
        device = _Device(queues, self._costs)
        device.run()
        return max(device.now, queues.cpu_us)

    @cached_property
    def _kernels(self) -> dict[str, tuple[OpNode, float, float]]:
        """Compute op that takes time → itself, that time, the CPU's: all that it takes to issue it."""
        costs = self._costs
        return {
            op.name: (op, costs.duration_us[op.name], costs.launch_us.get(op.name, 0.0))
            for op in self._program.ops
            if op.kind is OpKind.COMPUTE and costs.duration_us.get(op.name, 0.0) > 0
        }

    @cached_property
    def _silent(self) -> frozenset[str]:
        """Ops that nothing is issued for, and that cost the CPU nothing."""
        launch_us = self._costs.launch_us
        return frozenset(
            op.name
            for op in self._program.ops
            if op.collective is None and op.launch is None and op.name not in self._kernels and not launch_us.get(op.name)
        )

    def _issue(self, order: Sequence[str] | None) -> _Queues:
        """What the CPU does: put each op into the queue of its lane."""
        queues = _Queues()
        kernels, silent = self._kernels, self._silent
        exists = _Existence(self._program) if self._launch_after == "data" else None
        for name in self._program.order if order is None else order:
            kernel = kernels.get(name)
            if kernel is not None:
                op, length_us, launch_us = kernel
                queues.cpu_us += launch_us
                queues.compute.append(_Item(op, length_us, queues.cpu_us))
            elif name not in silent:
                self._issue_other(self._program.op(name), queues, exists)
            if exists is not None:
                exists.note(self._program.op(name), len(queues.compute))
        return queues

    def _issue_other(self, op: OpNode, queues: _Queues, exists: _Existence | None) -> None:
        """Launches, waits, and what costs the CPU's time alone."""
        costs = self._costs
        queues.cpu_us += costs.launch_us.get(op.name, 0.0)
        if op.collective is not None:
            _add_kernel(queues, op, costs)
            gate = len(queues.compute) if exists is None else exists.gate(op)
            item = _Item(op, costs.duration_us.get(op.name, 0.0), queues.cpu_us, gate, costs.contention_of(op.name))
            item.wire = costs.wires.get(op.collective.group, "")
            lane = costs.lane_of(op.name, op.collective)
            queues.collectives.setdefault(lane, []).append(item)
            if op.collective.by_copy or lane != op.collective.group:
                queues.copy_lanes.add(lane)  # a copy engine needs no multiprocessor
            queues.launched[op.name] = item
        elif op.launch is not None:
            if op.launch not in queues.launched:
                raise IllegalSchedule(f"wait {op.name!r} comes before its launch {op.launch!r}: launch it first")
            queues.compute.append(_Item(op, 0.0, queues.cpu_us, launch=queues.launched[op.launch]))
            _add_kernel(queues, op, costs)


@dataclass(slots=True)
class _Item:
    """One entry in a lane's queue.

    Attributes:
        gate: of a collective: how many entries of the compute queue must have finished first.
        contention: of a collective: how it and compute slow each other down.
        wire: of a collective: what it shares with others of the same wire.
        launch: of a wait: the collective waited for.
        ready_us: of a collective: when all it needed was a place on the device.
        blocked_us: of a collective: how long waits for it held the compute lane.
    """

    op: OpNode
    length_us: float
    issued_us: float
    gate: int = 0
    contention: Contention = _NONE
    wire: str = ""
    launch: _Item | None = None
    ready_us: float = math.inf
    start_us: float = math.inf
    end_us: float = math.inf
    blocked_us: float = 0.0


@dataclass(slots=True)
class _Queues:
    """What the CPU hands to the device, lane by lane."""

    compute: list[_Item] = field(default_factory=list)
    collectives: dict[str, list[_Item]] = field(default_factory=dict)
    copy_lanes: set[str] = field(default_factory=set)
    launched: dict[str, _Item] = field(default_factory=dict)
    cpu_us: float = 0.0


def _add_kernel(queues: _Queues, op: OpNode, costs: CostTable) -> None:
    """A launch that first casts what it sends, a wait that then sums what has arrived."""
    length_us = costs.kernel_us.get(op.name, 0.0)
    if length_us > 0:
        queues.compute.append(_Item(op, length_us, queues.cpu_us))


class _Existence:
    """For ``launch_after="data"``: after how many entries of the compute queue each result exists."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._results: dict[str, int] = {}
        self._writes: dict[int, int] = {}

    def gate(self, op: OpNode) -> int:
        storages = [storage for name in op.inputs for storage in self._program.op(name).storages]
        written = max((self._writes.get(storage, 0) for storage in storages), default=0)
        return max(written, max((self._results.get(name, 0) for name in op.inputs), default=0))

    def note(self, op: OpNode, issued: int) -> None:
        on_lane = op.kind in (OpKind.COMPUTE, OpKind.WAIT)
        self._results[op.name] = issued if on_lane else self.gate(op)
        for storage in op.writes:
            self._writes[storage] = issued


@dataclass(slots=True)
class _Lane:
    """A communicator: its queue, how far it is, and its current slow-down."""

    items: list[_Item]
    head: int = 0
    running: _Item | None = None
    factor: float = 1.0
    freed_us: float = -math.inf
    by_copy: bool = False

    @property
    def next_gate(self) -> float:
        """How many compute entries must have finished for something to start here; never while something runs."""
        idle = self.running is None and self.head < len(self.items)
        return self.items[self.head].gate if idle else math.inf


class _Device:
    """The lanes while they run; ``now`` goes from event to event."""

    def __init__(self, queues: _Queues, costs: CostTable) -> None:
        self._compute = queues.compute
        self._lanes = [_Lane(items, by_copy=name in queues.copy_lanes) for name, items in queues.collectives.items()]
        self._between_kernels = costs.starts_between_kernels
        self._sharing = costs.contention.communication_beside_communication - 1.0
        self._finished = 0
        self._running: _Item | None = None
        self._compute_factor = 1.0
        self._active: list[_Lane] = []
        self._blocked_since = math.inf
        self.now = 0.0
        self.compute_us = self.communication_us = self.exposed_us = 0.0

    def run(self) -> None:
        while True:
            wake_us = min(self._start_compute(), self._start_collectives())
            self._set_factors()
            self._run_on(min(wake_us, self._next_communication_end()))
            event_us = min(wake_us, self._next_end())
            if event_us == math.inf:
                return
            self._account(event_us - self.now)
            self.now = event_us
            self._finish()

    def _start_compute(self) -> float:
        """Start the next compute op, past waits that are over; returns when to look again if the CPU is late."""
        compute, now = self._compute, self.now
        while self._running is None and self._finished < len(compute):
            item = compute[self._finished]
            if item.issued_us > now:
                return item.issued_us
            if item.launch is None:
                item.start_us, item.end_us = now, now + item.length_us * self._compute_factor
                self._running = item
            elif item.launch.end_us <= now:
                item.launch.blocked_us += max(0.0, now - self._blocked_since)
                self._blocked_since = math.inf
                self._finished += 1
            else:
                self._blocked_since = min(self._blocked_since, now)
                break
        return math.inf

    def _start_collectives(self) -> float:
        """Start on each free communicator what may start; returns when to look again if the CPU is late."""
        wake_us = math.inf
        for lane in self._lanes:
            if lane.running is not None or lane.head == len(lane.items):
                continue
            item = lane.items[lane.head]
            if item.gate > self._finished:
                continue
            if item.issued_us > self.now:
                wake_us = min(wake_us, item.issued_us)
                continue
            item.ready_us = min(item.ready_us, self.now)
            if self._between_kernels and not lane.by_copy and self._crowded_out(item, lane):
                continue
            item.start_us, item.end_us = self.now, self.now + item.length_us * lane.factor
            lane.running = item
            self._active.append(lane)
        return wake_us

    def _crowded_out(self, item: _Item, lane: _Lane) -> bool:
        """A compute op got the multiprocessors first.

        At the same instant the compute op wins if it was the end of compute that made the collective ready (that news
        takes longer across streams than within one), and loses if it was the end of another collective.
        """
        running = self._running
        if running is None or running.start_us > item.ready_us:
            return False
        return running.start_us < item.ready_us or lane.freed_us < item.ready_us

    def _set_factors(self) -> None:
        """Note who runs beside whom; an end that was foreseen moves when the factor of its lane changes."""
        running, now = self._running, self.now
        beside = [(lane, lane.running) for lane in self._active if lane.running is not None]
        factor = max((item.contention.compute_beside_communication for _, item in beside), default=1.0)
        if running is not None and factor != self._compute_factor:
            running.end_us = now + (running.end_us - now) * (factor / self._compute_factor)
        self._compute_factor = factor
        for lane, item in beside:
            others = sum(other.wire == item.wire for _, other in beside) - 1
            factor = 1.0 + others * self._sharing
            if running is not None:
                factor *= item.contention.communication_beside_compute
            if factor != lane.factor:
                item.end_us = now + (item.end_us - now) * (factor / lane.factor)
                lane.factor = factor

    def _run_on(self, until_us: float) -> None:
        """Compute that meets nothing new: one op after the other, before anything starts or ends on another lane."""
        item = self._running
        if item is None:
            return
        compute, factor, finished = self._compute, self._compute_factor, self._finished
        last = min([len(compute), *(lane.next_gate for lane in self._lanes)]) - 1
        while finished < last and item.end_us < until_us:
            following = compute[finished + 1]
            if following.launch is not None or following.issued_us > item.end_us:
                break
            self._account(item.end_us - self.now)
            self.now = following.start_us = item.end_us
            following.end_us = self.now + following.length_us * factor
            item = following
            finished += 1
        self._running, self._finished = item, finished

    def _next_end(self) -> float:
        end_us = self._next_communication_end()
        return end_us if self._running is None else min(end_us, self._running.end_us)

    def _next_communication_end(self) -> float:
        return min((lane.running.end_us for lane in self._active if lane.running is not None), default=math.inf)

    def _account(self, passed_us: float) -> None:
        if self._active:
            self.communication_us += passed_us
        if self._running is not None:
            self.compute_us += passed_us
        elif self._active:
            self.exposed_us += passed_us

    def _finish(self) -> None:
        if self._running is not None and self._running.end_us <= self.now:
            self._running = None
            self._finished += 1
        for lane in tuple(self._active):
            if lane.running is not None and lane.running.end_us <= self.now:
                lane.running = None
                lane.freed_us = self.now
                lane.head += 1
                self._active.remove(lane)


def _summary(queues: _Queues, device: _Device, label: str) -> Simulation:
    step_us = max(device.now, queues.cpu_us)
    spans = [_span(item, "compute", SpanKind.COMPUTE) for item in queues.compute if item.launch is None]
    for lane, items in queues.collectives.items():
        spans += [_span(item, lane, SpanKind.COMMUNICATION) for item in items]
    visible = sorted((s for s in spans if s.end_ns > s.start_ns), key=lambda s: (s.start_ns, s.lane, s.name))
    return Simulation(
        timeline=Timeline(label, us_to_ns(step_us), tuple(visible), predicted=True),
        step_us=step_us,
        compute_us=device.compute_us,
        communication_us=device.communication_us,
        exposed_us=device.exposed_us,
        cpu_us=queues.cpu_us,
        blocked_us={item.op.name: item.blocked_us for items in queues.collectives.values() for item in items},
    )


def _span(item: _Item, lane: str, kind: SpanKind) -> Span:
    start_ns, end_ns = us_to_ns(item.start_us), us_to_ns(item.end_us)
    collective = item.op.collective
    if collective is None:
        return Span(item.op.name, kind, lane, start_ns, end_ns)
    # The root module's qualified name is empty, which no reader of a report would understand.
    unit = "(root)" if collective.unit == "" else collective.unit
    return Span(item.op.name, kind, lane, start_ns, end_ns, collective.kind.value, collective.payload_bytes, unit)
