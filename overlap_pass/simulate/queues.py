"""What the CPU does: it puts each op of an order into the queue of its lane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

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
    issued_us: float
    gate: int = 0
    contention: Contention = _NONE
    wire: str = ""
    launch: Item | None = None
    ready_us: float = math.inf
    start_us: float = math.inf
    end_us: float = math.inf
    blocked_us: float = 0.0


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
        return [tenants[index] for index in self._landlords[channel].give(staged_bytes(collective)).after]


@dataclass(slots=True)
class Queues:
    """What the CPU hands to the device, lane by lane."""

    staging: _Staging
    compute: list[Item] = field(default_factory=list)
    collectives: dict[str, list[Item]] = field(default_factory=dict)
    copy_lanes: set[str] = field(default_factory=set)
    launched: dict[str, Item] = field(default_factory=dict)
    waited: set[str] = field(default_factory=set)
    cpu_us: float = 0.0


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

    @cached_property
    def _heard(self) -> dict[str, tuple[float, Item | None, OpNode]]:
        """Ops that something is issued for or that cost the CPU time → that time, and a compute op's entry in its queue.

        That entry is the same in every run.
        """
        costs, found = self._costs, {}
        for op in self._program.ops:
            launch_us, length_us = costs.launch_us.get(op.name, 0.0), costs.duration_us.get(op.name, 0.0)
            runs = op.kind is OpKind.COMPUTE and length_us > 0
            if runs or launch_us or op.collective is not None or op.launch is not None:
                found[op.name] = (launch_us, Item(op, length_us, 0.0) if runs else None, op)
        return found

    @cached_property
    def _capacities(self) -> dict[Channel, int]:
        return capacities_bytes(self._program)

    @cached_property
    def _waits(self) -> dict[str, list[OpNode]]:
        """Launch → its waits."""
        found: dict[str, list[OpNode]] = {}
        for op in self._program.ops:
            if op.launch is not None:
                found.setdefault(op.launch, []).append(op)
        return found

    def issue(self, order: Sequence[str] | None) -> Queues:
        """What the CPU does: put each op into the queue of its lane."""
        queues = Queues(staging=_Staging(self._capacities))
        heard, compute, cpu_us = self._heard, queues.compute, -self._costs.cpu_ahead_us
        exists = _Existence(self._program) if self._launch_after == "data" else None
        for name in self._program.order if order is None else order:
            entry = heard.get(name)
            if entry is not None:
                launch_us, item, op = entry
                cpu_us += launch_us
                if item is not None:
                    item.issued_us = cpu_us
                    compute.append(item)
                else:
                    self._issue_other(op, cpu_us, queues, exists)
            if exists is not None:
                exists.note(self._program.op(name), len(compute))
        queues.cpu_us = max(cpu_us, 0.0)
        return queues

    def _issue_other(self, op: OpNode, issued_us: float, queues: Queues, exists: _Existence | None) -> None:
        """Launches and waits."""
        costs = self._costs
        if op.collective is not None:
            if op.collective.by_copy:
                self._make_room(op, op.collective, issued_us, queues)
            self._add_kernel(queues, op, issued_us)
            gate = len(queues.compute) if exists is None else exists.gate(op)
            item = Item(op, costs.duration_us.get(op.name, 0.0), issued_us, gate, costs.contention_of(op.name))
            item.wire = costs.wires.get(op.collective.group, "")
            lane = costs.lane_of(op.name, op.collective)
            queues.collectives.setdefault(lane, []).append(item)
            if op.collective.by_copy or lane != op.collective.group:
                queues.copy_lanes.add(lane)  # a copy engine needs no multiprocessor
            queues.launched[op.name] = item
        elif op.launch is not None:
            if op.launch not in queues.launched:
                raise IllegalSchedule(f"wait {op.name!r} comes before its launch {op.launch!r}: launch it first")
            self._issue_wait(op, op.launch, issued_us, queues)

    def _issue_wait(self, op: OpNode, launch: str, issued_us: float, queues: Queues) -> None:
        if op.name not in queues.waited:
            queues.waited.add(op.name)
            queues.compute.append(Item(op, 0.0, issued_us, launch=queues.launched[launch]))
            self._add_kernel(queues, op, issued_us)

    def _make_room(self, op: OpNode, collective: Collective, issued_us: float, queues: Queues) -> None:
        """Hold the compute lane until the place that a launch by copy takes is free.

        What a gather casts may only be put there when the peers have fetched what was there before; they have when this
        rank has, for all do the same. Gradients that lie there are summed first, which ``rewrite.places`` moves here.
        """
        tenants = queues.staging.tenants_before(op.name, collective)
        if collective.kind is not CollectiveKind.ALL_GATHER:
            for tenant in tenants:
                for wait in self._waits.get(tenant, ()):
                    self._issue_wait(wait, tenant, issued_us, queues)
        elif tenants:  # copies end in the order of their launches
            queues.compute.append(Item(op, 0.0, issued_us, launch=queues.launched[tenants[-1]]))

    def _add_kernel(self, queues: Queues, op: OpNode, issued_us: float) -> None:
        """A launch that first casts what it sends, a wait that then sums what has arrived."""
        length_us = self._costs.kernel_us.get(op.name, 0.0)
        if length_us > 0:
            queues.compute.append(Item(op, length_us, issued_us))
