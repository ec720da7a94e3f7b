"""What the CPU does: it puts each op of an order into the queue of its lane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.model import CostTable
from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.program import Collective, CollectiveKind, Lease, OpKind, OpNode, Program
from overlap_pass.memory.places import Landlord, Tenants
from overlap_pass.memory.staging import Channel, capacities_bytes, channel_of, staged_bytes

__all__ = ["ComputeQueue", "Issuer", "Item", "LaunchAfter", "Queues"]

LaunchAfter = Literal["issue", "data"]


@dataclass(slots=True)
class Item:
    """A collective in the queue of its lane.

    Attributes:
        alone_us, length_us: what it takes by its price, and in this run.
        contention: how it and compute slow each other down.
        wire: what it shares with others of the same wire.
        gate: how many entries of the compute queue must have finished first.
        ready_us: when all it needed was a place on the device.
        blocked_us: how long waits for it held the compute lane.
    """

    op: OpNode
    alone_us: float
    contention: Contention
    wire: str
    length_us: float = 0.0
    issued_us: float = 0.0
    gate: int = 0
    ready_us: float = math.inf
    start_us: float = math.inf
    end_us: float = math.inf
    blocked_us: float = 0.0

    def rewind(self, stretch: float) -> None:
        """As it was before it ran, now to take ``stretch`` times its price."""
        self.length_us, self.blocked_us = self.alone_us * stretch, 0.0
        self.ready_us = self.start_us = self.end_us = math.inf


@dataclass(slots=True)
class ComputeQueue:
    """The compute lane's: kernels, and waits, which let nothing past until a collective has ended.

    Attributes:
        lengths_us: what each entry takes.
        issued_us: when the CPU has issued it.
        stops: which entries are waits, ascending.
        awaited: for each of them, the collective.
        begun: for each of them, whether it is over when the collective has begun; else when it has ended.
        ops: positions of the compute ops among the entries, in their order.
        kernels: entry → position of the launch or wait whose kernel it is.
    """

    ops: list[int]
    lengths_us: list[float] = field(default_factory=list)
    issued_us: list[float] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    awaited: list[Item] = field(default_factory=list)
    begun: list[bool] = field(default_factory=list)
    kernels: dict[int, int] = field(default_factory=dict)

    def run(self, position: int, length_us: float, issued_us: float) -> None:
        """A kernel of a launch or a wait."""
        self.kernels[len(self.lengths_us)] = position
        self._append(length_us, issued_us)

    def wait(self, awaited: Item, issued_us: float, *, begun: bool = False) -> None:
        self.stops.append(len(self.lengths_us))
        self.awaited.append(awaited)
        self.begun.append(begun)
        self._append(0.0, issued_us)

    def _append(self, length_us: float, issued_us: float) -> None:
        self.lengths_us.append(length_us)
        self.issued_us.append(issued_us)

    def positions(self) -> dict[int, int]:
        """Entry → position of its op, for all but waits."""
        ops, stops = iter(self.ops), set(self.stops)
        entries = (entry for entry in range(len(self.lengths_us)) if entry not in stops)
        return {entry: self.kernels[entry] if entry in self.kernels else next(ops) for entry in entries}


class _Staging:
    """The memory that copy engines share, used round and round, or as settled before: a launch waits until its place is free."""

    def __init__(self, capacities: Mapping[Channel, int]) -> None:
        self._landlords = {channel: Landlord(capacity) for channel, capacity in capacities.items()}
        self._leased: dict[Channel, Tenants] = {}
        self._tenants: dict[Channel, list[int]] = {channel: [] for channel in capacities}

    def tenants_before(self, position: int, collective: Collective, lease: Lease | None) -> list[int]:
        """Launches that must have left before the one at ``position`` takes its place, oldest first."""
        channel = channel_of(collective)
        tenants = self._tenants[channel]
        tenants.append(position)
        if lease is not None:
            leased = self._leased.setdefault(channel, Tenants())
            _, over = leased.take(lease.offset_bytes, lease.end_bytes, any(lease.final))
            return [] if over is None else [tenants[over]]
        _, after = self._landlords[channel].give(staged_bytes(collective))
        return [tenants[index] for index in after]


@dataclass(slots=True)
class Queues:
    """What the CPU hands to the device, lane by lane.

    Attributes:
        kernels: the collectives of all communicators, where only so many may be pending.
    """

    staging: _Staging
    copy_lanes: frozenset[str]
    compute: ComputeQueue
    cpu_us: float
    collectives: dict[str, list[Item]] = field(default_factory=dict)
    kernels: list[Item] = field(default_factory=list)
    launched: set[int] = field(default_factory=set)
    waited: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Entry:
    """What a launch or a wait puts into queues, the same in every order.

    Attributes:
        collective: of a launch.
        item: of a launch its own, of a wait that of its launch.
        launch: of a wait, the position of its launch.
        kernel_us: what a launch first casts, or a wait then sums, on the compute lane.
        lane: of a launch.
    """

    op: OpNode
    item: Item
    launch: int | None
    kernel_us: float
    lane: str = ""
    collective: Collective | None = None


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


class Issuer:
    """Issues orders of one program, one after the other: each takes over the entries of the one before."""

    def __init__(self, program: Program, costs: CostTable, launch_after: LaunchAfter) -> None:
        self._program, self._costs, self._launch_after = program, costs, launch_after

    def issue(self, order: Sequence[int] | None) -> Queues:
        """What the CPU does: put each op into the queue of its lane.

        Args:
            order: all positions; ``None`` for as written.
        """
        exists = _Existence(self._program) if self._launch_after == "data" else None
        positions = np.arange(len(self._runs)) if order is None else np.asarray(order, dtype=np.int64)
        positions = positions[self._counts[positions]] if exists is None else positions
        clock_us = np.cumsum(np.concatenate(([-self._costs.cpu_ahead_us], self._launch_us[positions])))
        runs, entries = self._runs[positions], self._entries
        running = positions[runs]
        lengths_us, issued_us = self._run_us[running].tolist(), clock_us[1:][runs].tolist()
        compute = ComputeQueue(running.tolist())
        queues = Queues(_Staging(self._capacities), self._copy_lanes, compute, max(float(clock_us[-1]), 0.0))
        # Between two of the ops that are looked at, kernels go into the queue as they are.
        looked_at = np.flatnonzero(~runs) if exists is None else np.arange(len(positions))
        columns = (positions[looked_at], np.cumsum(runs)[looked_at], clock_us[1:][looked_at])
        done = 0
        for position, end, at_us in zip(*(column.tolist() for column in columns), strict=True):
            if end > done:
                compute.lengths_us += lengths_us[done:end]
                compute.issued_us += issued_us[done:end]
                done = end
            entry = entries[position]
            if entry is not None and entry.launch is None:
                self._issue_launch(position, entry, at_us, queues, exists)
            elif entry is not None:
                self._issue_wait(position, entry, at_us, queues)
            if exists is not None:
                exists.note(self._program.ops[position], len(compute.lengths_us))
        compute.lengths_us += lengths_us[done:]
        compute.issued_us += issued_us[done:]
        return queues

    def _issue_launch(
        self, position: int, entry: _Entry, issued_us: float, queues: Queues, exists: _Existence | None
    ) -> None:
        if entry.collective is not None and entry.collective.by_copy:
            self._make_room(position, entry.collective, issued_us, queues)
        if entry.kernel_us > 0:
            queues.compute.run(position, entry.kernel_us, issued_us)
        entry.item.issued_us = issued_us
        entry.item.gate = len(queues.compute.lengths_us) if exists is None else exists.gate(entry.op)
        queues.collectives.setdefault(entry.lane, []).append(entry.item)
        queues.launched.add(position)
        most = self._costs.most_pending
        if most is not None and exists is None and entry.lane not in self._copy_lanes:
            queues.kernels.append(entry.item)
            if len(queues.kernels) > most:
                queues.compute.wait(queues.kernels[-most - 1], issued_us, begun=True)

    def _issue_wait(self, position: int, entry: _Entry, issued_us: float, queues: Queues) -> None:
        if entry.launch not in queues.launched:
            raise IllegalSchedule(
                f"wait {entry.op.name!r} comes before its launch {entry.op.launch!r}: launch it first"
            )
        if position not in queues.waited:
            queues.waited.add(position)
            queues.compute.wait(entry.item, issued_us)
            if entry.kernel_us > 0:
                queues.compute.run(position, entry.kernel_us, issued_us)

    def _make_room(self, position: int, collective: Collective, issued_us: float, queues: Queues) -> None:
        """Hold the compute lane until the place that a launch by copy takes is free.

        What a gather casts may only be put there when the peers have fetched what was there before; they have when this
        rank has, for all do the same. Gradients that lie there are summed first, which ``rewrite.places`` moves here.
        """
        program = self._program
        lease = program.leases.get(program.ops[position].name)
        tenants = queues.staging.tenants_before(position, collective, lease)
        if collective.kind is not CollectiveKind.ALL_GATHER:
            for tenant in tenants:
                for wait in map(program.index.__getitem__, program.waits_of[program.ops[tenant].name]):
                    entry = self._entries[wait]
                    if entry is not None:
                        self._issue_wait(wait, entry, issued_us, queues)
        elif tenants and (last := self._entries[tenants[-1]]):  # copies end in the order of their launches
            queues.compute.wait(last.item, issued_us)

    @cached_property
    def _capacities(self) -> dict[Channel, int]:
        return capacities_bytes(self._program)

    @cached_property
    def _entries(self) -> list[_Entry | None]:
        """By position, of launches and waits."""
        program, costs = self._program, self._costs
        items = {op.name: self._item(op) for op in program.launches}
        found: list[_Entry | None] = [None] * len(program.ops)
        for position, op in enumerate(program.ops):
            if op.collective is not None:
                lane, kernel_us = costs.lane_of(op.name, op.collective), costs.kernel_us.get(op.name, 0.0)
                found[position] = _Entry(op, items[op.name], None, kernel_us, lane, op.collective)
            elif op.launch is not None:
                kernel_us = costs.kernel_us.get(op.name, 0.0)
                found[position] = _Entry(op, items[op.launch], program.index[op.launch], kernel_us)
        return found

    def _item(self, op: OpNode) -> Item:
        costs = self._costs
        wire = "" if op.collective is None else costs.wires.get(op.collective.group, "")
        return Item(op, costs.duration_us.get(op.name, 0.0), costs.contention_of(op.name), wire)

    @cached_property
    def _run_us(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """By position, what the op takes on the compute lane."""
        duration_us, ops = self._costs.duration_us, self._program.ops
        return np.array([duration_us.get(op.name, 0.0) if op.kind is OpKind.COMPUTE else 0.0 for op in ops])

    @cached_property
    def _runs(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return self._run_us > 0

    @cached_property
    def _launch_us(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([self._costs.launch_us.get(op.name, 0.0) for op in self._program.ops])

    @cached_property
    def _counts(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether anything is issued for an op, or it costs the CPU time."""
        counts: np.ndarray[Any, np.dtype[np.bool_]] = self._runs | (self._launch_us != 0)
        counts[[position for position, entry in enumerate(self._entries) if entry is not None]] = True
        return counts

    @cached_property
    def _copy_lanes(self) -> frozenset[str]:
        """Copy engines, which need no multiprocessor."""
        found = set()
        for entry in self._entries:
            collective = None if entry is None else entry.collective
            if entry is not None and collective and (collective.by_copy or entry.lane != collective.group):
                found.add(entry.lane)
        return frozenset(found)
