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
from overlap_pass.graph.program import Collective, CollectiveKind, OpKind, OpNode, Program
from overlap_pass.memory.places import Landlord
from overlap_pass.memory.staging import Channel, capacities_bytes, channel_of, staged_bytes

__all__ = ["Issuer", "Item", "LaunchAfter", "Queues"]

LaunchAfter = Literal["issue", "data"]

_NONE = Contention()


@dataclass(slots=True)
class Item:
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
    issued_us: float = 0.0
    gate: int = 0
    contention: Contention = _NONE
    wire: str = ""
    launch: Item | None = None
    ready_us: float = math.inf
    start_us: float = math.inf
    end_us: float = math.inf
    blocked_us: float = 0.0

    def issue(self, issued_us: float, gate: int) -> None:
        """A collective is as it was before it ran in another order."""
        self.issued_us, self.gate, self.blocked_us = issued_us, gate, 0.0
        self.ready_us = self.start_us = self.end_us = math.inf


class _Staging:
    """The staging memory of copy engines, used round and round: a launch waits until its place is free again."""

    def __init__(self, capacities: Mapping[Channel, int]) -> None:
        self._landlords = {channel: Landlord(capacity) for channel, capacity in capacities.items()}
        self._tenants: dict[Channel, list[str]] = {channel: [] for channel in capacities}

    def tenants_before(self, name: str, collective: Collective) -> list[str]:
        """Launches whose place the launch ``name`` takes over, oldest first."""
        channel = channel_of(collective)
        tenants = self._tenants[channel]
        tenants.append(name)
        _, after = self._landlords[channel].give(staged_bytes(collective))
        return [tenants[index] for index in after]


@dataclass(slots=True)
class Queues:
    """What the CPU hands to the device, lane by lane."""

    staging: _Staging
    copy_lanes: frozenset[str] = frozenset()
    compute: list[Item] = field(default_factory=list)
    collectives: dict[str, list[Item]] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    waited: set[str] = field(default_factory=set)
    cpu_us: float = 0.0


@dataclass(slots=True)
class _Entry:
    """What an op puts into queues, the same in every order.

    Attributes:
        launch_us: what it costs the CPU.
        item: its own.
        runs, communicates: whether that is of compute, of a collective or a wait; of neither it is in no queue.
        kernel: what a launch first casts, or a wait then sums, on the compute lane.
        room: of a gather by copy: its wait for a place in staging memory.
        lane: of a collective.
    """

    op: OpNode
    launch_us: float
    item: Item
    runs: bool
    communicates: bool
    kernel: Item | None = None
    room: Item | None = None
    lane: str = ""


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
        queues = Queues(_Staging(self._capacities), self._copy_lanes)
        entries, compute, cpu_us = self._entries, queues.compute, -self._costs.cpu_ahead_us
        exists = _Existence(self._program) if self._launch_after == "data" else None
        for position in self._heard(order, everything=exists is not None):
            entry = entries[position]
            cpu_us += entry.launch_us
            if entry.runs:
                entry.item.issued_us = cpu_us
                compute.append(entry.item)
            elif entry.communicates:
                self._issue_other(entry, cpu_us, queues, exists)
            if exists is not None:
                exists.note(entry.op, len(compute))
        queues.cpu_us = max(cpu_us, 0.0)
        return queues

    def _issue_other(self, entry: _Entry, issued_us: float, queues: Queues, exists: _Existence | None) -> None:
        """Launches and waits."""
        item, op = entry.item, entry.op
        if op.collective is not None:
            if op.collective.by_copy:
                self._make_room(entry, op.collective, issued_us, queues)
            self._add_kernel(entry, issued_us, queues)
            item.issue(issued_us, len(queues.compute) if exists is None else exists.gate(op))
            queues.collectives.setdefault(entry.lane, []).append(item)
            queues.launched.add(op.name)
            return
        if op.launch not in queues.launched:
            raise IllegalSchedule(f"wait {op.name!r} comes before its launch {op.launch!r}: launch it first")
        self._issue_wait(entry, issued_us, queues)

    def _issue_wait(self, entry: _Entry, issued_us: float, queues: Queues) -> None:
        if entry.op.name not in queues.waited:
            queues.waited.add(entry.op.name)
            entry.item.issued_us = issued_us
            queues.compute.append(entry.item)
            self._add_kernel(entry, issued_us, queues)

    def _make_room(self, entry: _Entry, collective: Collective, issued_us: float, queues: Queues) -> None:
        """Hold the compute lane until the place that a launch by copy takes is free.

        What a gather casts may only be put there when the peers have fetched what was there before; they have when this
        rank has, for all do the same. Gradients that lie there are summed first, which ``rewrite.places`` moves here.
        """
        tenants = queues.staging.tenants_before(entry.op.name, collective)
        if entry.room is None:
            for tenant in tenants:
                for wait in self._program.waits_of[tenant]:
                    self._issue_wait(self._entries[self._program.index[wait]], issued_us, queues)
        elif tenants:  # copies end in the order of their launches
            entry.room.issued_us = issued_us
            entry.room.launch = self._entries[self._program.index[tenants[-1]]].item
            queues.compute.append(entry.room)

    def _add_kernel(self, entry: _Entry, issued_us: float, queues: Queues) -> None:
        if entry.kernel is not None:
            entry.kernel.issued_us = issued_us
            queues.compute.append(entry.kernel)

    def _heard(self, order: Sequence[int] | None, *, everything: bool) -> list[int]:
        """The order without the ops that nothing is issued for and that cost the CPU no time."""
        positions = np.arange(len(self._entries)) if order is None else np.asarray(order, dtype=np.int64)
        found: list[int] = (positions if everything else positions[self._counts[positions]]).tolist()
        return found

    @cached_property
    def _capacities(self) -> dict[Channel, int]:
        return capacities_bytes(self._program)

    @cached_property
    def _entries(self) -> tuple[_Entry, ...]:
        items = {op.name: self._item(op) for op in self._program.ops}
        for op in self._program.ops:
            if op.launch is not None:
                items[op.name].launch = items[op.launch]
        return tuple(self._entry(op, items[op.name]) for op in self._program.ops)

    def _entry(self, op: OpNode, item: Item) -> _Entry:
        costs, collective = self._costs, op.collective
        kernel_us = costs.kernel_us.get(op.name, 0.0)
        kernel = Item(op, kernel_us) if kernel_us > 0 else None
        communicates = collective is not None or op.launch is not None
        runs = op.kind is OpKind.COMPUTE and item.length_us > 0 and not communicates
        lane = "" if collective is None else costs.lane_of(op.name, collective)
        gathers = collective is not None and collective.by_copy and collective.kind is CollectiveKind.ALL_GATHER
        room = Item(op, 0.0) if gathers else None
        return _Entry(op, costs.launch_us.get(op.name, 0.0), item, runs, communicates, kernel, room, lane)

    def _item(self, op: OpNode) -> Item:
        costs, length_us = self._costs, self._costs.duration_us.get(op.name, 0.0)
        if op.collective is not None:
            wire = costs.wires.get(op.collective.group, "")
            return Item(op, length_us, contention=costs.contention_of(op.name), wire=wire)
        return Item(op, 0.0 if op.launch is not None else length_us)

    @cached_property
    def _counts(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        found = (entry.runs or entry.communicates or entry.launch_us != 0 for entry in self._entries)
        return np.fromiter(found, dtype=np.bool_, count=len(self._entries))

    @cached_property
    def _copy_lanes(self) -> frozenset[str]:
        """Copy engines, which need no multiprocessor."""
        found = set()
        for entry in self._entries:
            collective = entry.op.collective
            if collective is not None and (collective.by_copy or entry.lane != collective.group):
                found.add(entry.lane)
        return frozenset(found)
