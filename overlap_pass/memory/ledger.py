"""Memory of an order of ops: what is alive while each op runs, and the peak.

The rules, over alias sets (storages), not over tensors:

1. What the caller holds (parameters, static inputs) is the base: alive all the time.
2. Other inputs (saved activations, tangents) are alive from the start and die after their last use.
3. An op's output is allocated before its dying inputs are freed: the transient inside the op counts.
4. A collective's output is allocated at its launch, and its input stays alive until its last wait.
5. What the graph returns lives to the end; so does an input that nothing reads and what a launch without a wait reads.

A storage of 0 bytes (an effect token) changes nothing.

That is what an interpreter of the graph allocates, op by op, and an upper bound for compiled code: what budgets bound. A
compiler that fuses ops never allocates what passes between them, nor what every reader computes again; told which
(:func:`overlap_pass.cost.compute.clusters`), the ledger gives such a result no bytes and keeps what a cluster reads, through
what it computes again too, until its last member, as one kernel would. That is an estimate: what really fuses is known only
after the lowering.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from overlap_pass.cost.compute import Cluster, clusters
from overlap_pass.graph.program import OpKind, OpNode, Program
from overlap_pass.memory.staging import staging_bytes

_Numbers = np.ndarray[Any, np.dtype[np.int64]]

__all__ = ["Ledger", "Lifetimes", "MemoryProfile", "compiled_peak", "peak", "resident_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of one order.

    Attributes:
        peak_bytes: the most that is ever alive.
        peak_op: the first op while which that much is alive.
        base_bytes: what the caller holds.
        live_bytes: for each position of the order, what is alive while that op runs: its output is there already and
            its dying inputs are there still. ``max(live_bytes) == peak_bytes``.
    """

    peak_bytes: int
    peak_op: str
    base_bytes: int
    live_bytes: tuple[int, ...]


class Lifetimes:
    """Who allocates each storage of a program and how many ops touch it: made once, shared by many ledgers.

    Args:
        program: the graph.
        fused: ops that run as one kernel each; none for an interpreter.
        resident_bytes: what the process holds beside what the graph names (optimizer state, gradients kept from
            micro-batches before); part of the base.

    Attributes:
        size_bytes: size of each storage, by id.
        base_bytes: held storages, and what copy engines keep.
        start_bytes: alive before the first op: held storages and all other inputs.
        allocated: by position, the bytes that the op allocates.
        touches: by position, ids of the storages that may die once the op has run, ascending.
        uses: by storage id, how many ops have to run before it dies; more than touch it where it never dies.
    """

    def __init__(self, program: Program, *, fused: Iterable[Cluster] = (), resident_bytes: int = 0) -> None:
        late, never = _fusion(program, fused)
        self.size_bytes = tuple(0 if storage.id in never else storage.size_bytes for storage in program.storages)
        held_bytes = sum(storage.size_bytes for storage in program.storages if storage.held)
        self.base_bytes = resident_bytes + staging_bytes(program) + held_bytes
        self.start_bytes = self.base_bytes
        allocated = [0] * len(program.ops)
        for storage in program.storages:
            position = program.index[storage.owner]
            if program.ops[position].kind is not OpKind.INPUT:
                allocated[position] += self.size_bytes[storage.id]
            elif not storage.held:
                self.start_bytes += storage.size_bytes
        self.allocated = tuple(allocated)
        mortal = {storage.id for storage in program.storages if self.size_bytes[storage.id] and not storage.held}
        uses = [0] * len(program.storages)
        touches: list[tuple[int, ...]] = []
        for op in program.ops:
            named = frozenset() if op.kind is OpKind.INPUT else program.touched(op)
            touched = mortal & (named | late[op.name] if op.name in late else named)
            for storage_id in touched:
                uses[storage_id] += 1
            touches.append(() if _keeps(program, op) else tuple(sorted(touched)))
        self.touches = tuple(touches)
        self.uses = tuple(uses)

    def peak_bytes(self, order: Sequence[int]) -> int:
        """The peak of an order of all positions: what a :class:`Ledger` would find, in array operations."""
        return max(self.start_bytes, int(self.live_bytes(order)[0].max(initial=0)))

    def live_bytes(self, order: Sequence[int]) -> tuple[_Numbers, _Numbers]:
        """What is alive while each op of an order of all positions runs, and what is when it has run."""
        at, count = np.asarray(order, dtype=np.int64), len(order)
        steps = _places(at)
        touched_at, starts, sizes = self._deaths
        freed = np.zeros(count, dtype=np.int64)
        if len(starts):  # sums of less than 2**53 bytes, which floats add exactly
            freed += np.bincount(np.maximum.reduceat(steps[touched_at], starts), sizes, count).astype(np.int64)
        allocated = self._allocated[at]
        after = self.start_bytes + (allocated - freed).cumsum()
        return after + freed, after

    def of_order(self, order: Sequence[int]) -> Lifetimes:
        """Those of the program with its ops in another order, by their positions in that one."""
        twin, at = copy(self), np.asarray(order, dtype=np.int64)
        twin.allocated = tuple([self.allocated[position] for position in order])
        twin.touches = tuple([self.touches[position] for position in order])
        steps = _places(at)
        touched_at, starts, sizes = self._deaths
        vars(twin).update(_allocated=self._allocated[at], _deaths=(steps[touched_at], starts, sizes))
        return twin

    @cached_property
    def _allocated(self) -> _Numbers:
        return np.array(self.allocated, dtype=np.int64)

    @cached_property
    def _deaths(self) -> tuple[_Numbers, _Numbers, _Numbers]:
        """For all storages that die, in a row: the ops after the last of which each does, where its ops start, its size."""
        touched_at = np.repeat(np.arange(len(self.touches)), [len(touched) for touched in self.touches])
        storages = np.fromiter(chain.from_iterable(self.touches), np.int64, len(touched_at))
        counts = np.bincount(storages, minlength=len(self.uses))
        dies = (counts > 0) & (counts == np.array(self.uses, dtype=np.int64))
        kept = dies[storages]
        touched_at, storages = touched_at[kept], storages[kept]
        starts = (counts[dies].cumsum() - counts[dies]).astype(np.int64)
        sizes = np.array(self.size_bytes, dtype=np.int64)[dies]
        return touched_at[storages.argsort(kind="stable")], starts, sizes


def _places(order: _Numbers) -> _Numbers:
    """By position, its place in an order of all positions."""
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    return places


def _fusion(program: Program, fused: Iterable[Cluster]) -> tuple[dict[str, set[int]], set[int]]:
    """Last member of each cluster → storages that the cluster touches; storages that are never allocated."""
    late: dict[str, set[int]] = {}
    never: set[int] = set()
    for cluster in fused:
        touched = [program.touched(program.op(name)) for name in cluster.members]
        late[cluster.members[-1]] = set().union(*touched, *(program.op(name).storages for name in cluster.sources))
        for name in cluster.unstored:
            never.update(s for s in program.op(name).storages if program.storages[s].owner == name)
    return late, never


def _keeps(program: Program, op: OpNode) -> bool:
    """What this op touches is never freed: the output hands it out, and nothing ever waits for the launch."""
    return op.kind is OpKind.OUTPUT or (op.kind is OpKind.LAUNCH and not program.waits_of[op.name])


class Ledger:
    """Memory of an order while it is being made: the list scheduler advances it by one op at a time.

    Ops are named by their position in the program, as in ``DepGraph.successors``. Each question and each step costs
    time in proportion to what the one op touches. Whether the order is legal is not asked.

    Attributes:
        live_bytes: alive after the last op that was run.
        peak_bytes: the most that was alive so far, transients inside ops included.
    """

    __slots__ = ("_lifetimes", "_remaining", "live_bytes", "peak_bytes")

    def __init__(self, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._remaining = list(lifetimes.uses)
        self.live_bytes = self.peak_bytes = lifetimes.start_bytes

    def advance(self, position: int) -> None:
        """Run the op: allocate its output, note the peak, free what dies with it."""
        lifetimes, remaining = self._lifetimes, self._remaining
        live = self.live_bytes + lifetimes.allocated[position]
        if live > self.peak_bytes:
            self.peak_bytes = live
        for storage_id in lifetimes.touches[position]:
            remaining[storage_id] -= 1
            if not remaining[storage_id]:
                live -= lifetimes.size_bytes[storage_id]
        self.live_bytes = live

    def allocates(self, position: int) -> int:
        """Bytes that the op would allocate; ``live_bytes`` plus this is what is alive while it runs."""
        return self._lifetimes.allocated[position]

    def frees(self, position: int) -> int:
        """Bytes that would be free after the op, its own output included where nothing reads it."""
        size_bytes, remaining = self._lifetimes.size_bytes, self._remaining
        return sum(size_bytes[i] for i in self._lifetimes.touches[position] if remaining[i] == 1)

    def copy(self) -> Ledger:
        """An independent ledger in the same state, to try a continuation on."""
        twin = Ledger.__new__(Ledger)
        twin._lifetimes = self._lifetimes
        twin._remaining = self._remaining.copy()
        twin.live_bytes, twin.peak_bytes = self.live_bytes, self.peak_bytes
        return twin


def resident_bytes(forward: Program, backward: Program) -> int:
    """What is held during the backward of a step that only the forward names, such as shards that nothing gathers again."""
    held = (storage for storage in forward.storages if storage.held and storage.owner not in backward.index)
    return sum(storage.size_bytes for storage in held)


def peak(
    program: Program,
    order: Sequence[str] | None = None,
    *,
    fused: Iterable[Cluster] = (),
    resident_bytes: int = 0,
) -> MemoryProfile:
    """Memory of ``order`` (default: as written), in time linear in ops and the storages they touch.

    Args:
        program: the graph.
        order: op names, each once.
        fused, resident_bytes: see :class:`Lifetimes`.
    """
    lifetimes = Lifetimes(program, fused=fused, resident_bytes=resident_bytes)
    ledger = Ledger(lifetimes)
    names = program.order if order is None else order
    live_bytes: list[int] = []
    for name in names:
        position = program.index[name]
        live_bytes.append(ledger.live_bytes + lifetimes.allocated[position])
        ledger.advance(position)
    peak_op = names[live_bytes.index(ledger.peak_bytes)] if live_bytes else ""
    return MemoryProfile(ledger.peak_bytes, peak_op, lifetimes.base_bytes, tuple(live_bytes))


def compiled_peak(program: Program, order: Sequence[str] | None = None, *, resident_bytes: int = 0) -> MemoryProfile:
    """Memory of ``order`` as a compiler that fuses is expected to allocate it: an estimate, where :func:`peak` is a bound."""
    return peak(program, order, fused=clusters(program, indexed=True), resident_bytes=resident_bytes)
