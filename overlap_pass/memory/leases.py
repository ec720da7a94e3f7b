"""Gathered parameters in the memory that the ranks share: each rank's own part is written once, where the peers fetch it.

::

    staged     shard ─ cast ─┬─▶ gathered parameter ◀── peers' parts         8 bytes an element of float32 for bfloat16
                             └─▶ staging ──▶ peers
    final      shard ─ cast ───▶ gathered parameter, in shared memory ◀──▶ peers                             6 bytes

Every rank has to know where a parameter lies at its peers. So places are made of what no rank sees differently: the order of
launches, sizes, and which of them stand behind the last reader of which parameter. What takes the place of a parameter must
stand behind all of its readers, in any order (``EdgeKind.PLACE``); as the order that the places are made for is legal and
keeps that, there always is one. Peers that fetch are no concern: who has read a parameter has waited for it, and a gather is
over when all ranks have fetched it.

Only what matmuls alone read, through views and copies, lies there. Other kernels may be fused and read later than they
stand; what leaves the graph has to outlive it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Category, CollectiveKind, Lease, OpKind, OpNode, Phase, Program, Role
from overlap_pass.memory.places import Tenants, bits, laid_out
from overlap_pass.memory.staging import GATHERS_AT_ONCE, Channel, by_copy, capacities_bytes, channel_of

__all__ = ["leased", "placed"]

_LEAST_BYTES = 2**20
"""Of a parameter: a cast of less takes next to no time."""

_MOST_FINAL = 62
"""Results of one launch that lie there: a bit for each in a number of 64."""


def leased(program: Program, ahead: int = 0) -> Program:
    """The program with leases for its gathers by copy; itself where no parameter could lie in shared memory.

    Args:
        program: in an order of launches that it is to keep.
        ahead: how many launches earlier than in this order each may be made, as far as places go.
    """
    readers = _readers(program)
    offsets: dict[str, int] = {}
    for launches in _channels(program).values():
        if any(storage in readers for launch in launches for storage in program.results(launch)):
            sizes = [_lease(program, launch, readers).size_bytes for launch in launches]
            places = _first_fit(sizes, _leave(program, launches, readers, ahead))
            offsets.update((launch.name, offset) for launch, offset in zip(launches, places, strict=True))
    return placed(program, offsets) if offsets else program


def placed(program: Program, offsets: Mapping[str, int]) -> Program:
    """The program with leases that begin at these bytes, by launch: for all gathers by copy of a communicator, or for none.

    Raises:
        PlanError: for some of them, or for something else.
    """
    readers = _readers(program)
    leases: dict[str, Lease] = {}
    for launches in _channels(program).values():
        if all(launch.name in offsets for launch in launches):
            found = [replace(_lease(program, one, readers), offset_bytes=offsets[one.name]) for one in launches]
            capacity_bytes = _capacity_bytes(program, launches[0], found)
            tenants = Tenants()
            for launch, lease in zip(launches, found, strict=True):
                gone, _ = tenants.take(lease.offset_bytes, lease.end_bytes, any(lease.final))
                displaced = (storage for number in gone for storage in program.results(launches[number]))
                behind = dict.fromkeys(name for storage in displaced for name in readers.get(storage, ()))
                leases[launch.name] = replace(lease, capacity_bytes=capacity_bytes, behind=tuple(behind))
    if leases.keys() != offsets.keys():
        raise PlanError(
            f"places are given for {len(offsets)} launches, of which {len(leases)} are all of a communicator"
        )
    final = {s for name in leases for s in program.results(program.op(name)) if s in readers}
    storages = tuple(replace(s, size_bytes=0) if s.id in final else s for s in program.storages)
    return replace(program, storages=storages, leases=leases, launches_fixed=True)


def _channels(program: Program) -> dict[Channel, list[OpNode]]:
    """Gathers by copy in their order, by what they share memory with, where all that they gather is waited for."""
    found: dict[Channel, list[OpNode]] = {}
    for name, collective in by_copy(program):
        if collective.kind is CollectiveKind.ALL_GATHER:
            found.setdefault(channel_of(collective), []).append(program.op(name))
    waited = (all(len(program.results(one)) == len(one.inputs) for one in launches) for launches in found.values())
    return dict(itertools.compress(found.items(), waited))


def _capacity_bytes(program: Program, launch: OpNode, found: Sequence[Lease]) -> int:
    """Up to the end of the last place. A forward shares no less than if it staged all: so its backward, which may, needs no
    memory beside it."""
    end_bytes = max(lease.end_bytes for lease in found)
    if program.phase is not Phase.FORWARD or launch.collective is None:
        return end_bytes
    return max(end_bytes, capacities_bytes(replace(program, leases={}))[channel_of(launch.collective)])


def _lease(program: Program, launch: OpNode, readers: Mapping[int, Sequence[str]]) -> Lease:
    """Its size; where it begins is not said yet."""
    results = program.results(launch)
    final = tuple(storage in readers for storage in results)
    ranks = launch.collective.group_size if launch.collective else 1
    sizes = [program.storages[storage].size_bytes for storage in results]
    parts = tuple(size_bytes // ranks for size_bytes in sizes)
    _, size_bytes = laid_out(parts, bits(final), ranks)
    final_bytes = sum(size for size, lies_there in zip(sizes, final, strict=True) if lies_there)
    return Lease(0, 0, size_bytes, final, final_bytes)


def _leave(program: Program, launches: Sequence[OpNode], readers: Mapping[int, Sequence[str]], ahead: int) -> list[int]:
    """For each launch the number of the first one that may take its place."""
    at = [program.index[launch.name] for launch in launches]
    found = []
    for number, launch in enumerate(launches):
        last = max((program.index[name] for s in program.results(launch) for name in readers.get(s, ())), default=-1)
        found.append(number + GATHERS_AT_ONCE if last < 0 else bisect_left(at, last) + ahead)
    return found


def _first_fit(sizes_bytes: Sequence[int], leave: Sequence[int]) -> list[int]:
    """For each launch the first byte of the lowest place that all which lie there have left."""
    found: list[int] = []
    there: list[int] = []
    for number, size_bytes in enumerate(sizes_bytes):
        there = sorted((one for one in there if leave[one] > number), key=found.__getitem__)
        start = 0
        for one in there:
            if start + size_bytes <= found[one]:
                break
            start = max(start, found[one] + sizes_bytes[one])
        found.append(start)
        there.append(number)
    return found


def _readers(program: Program) -> dict[int, list[str]]:
    """Storage of each parameter that could lie in shared memory → the matmuls that read it, through views and copies."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    dropped: set[int] = set()
    carried: dict[str, frozenset[int]] = {}
    candidates = _candidates(program)
    for op in program.ops:
        dropped.update(candidates.intersection(op.writes))
        read = frozenset().union(*(carried.get(name, ()) for name in op.inputs))
        own = candidates.intersection(op.storages)
        if op.name in program.waits_of or op.kind in (OpKind.VIEW, OpKind.WAIT):
            carried[op.name] = own or read
        elif not read:
            continue
        elif _copies(op):
            carried[op.name] = read
        elif op.category is Category.MATMUL and not op.opaque:
            for storage in read:
                found[storage].append(op.name)
        else:
            dropped |= read
    large = {storage for storage in found if program.storages[storage].size_bytes >= _LEAST_BYTES}
    return {storage: names for storage, names in found.items() if storage in large - dropped}


def _candidates(program: Program) -> frozenset[int]:
    found: set[int] = set()
    for name, collective in by_copy(program):
        if collective.kind is CollectiveKind.ALL_GATHER and collective.role is Role.PARAMETER:
            found.update(program.results(program.op(name))[:_MOST_FINAL])
    return frozenset(found)


def _copies(op: OpNode) -> bool:
    """Whether its result is what it reads, as it is or in another dtype or shape; read by whoever reads that."""
    plain = op.kind is OpKind.COMPUTE and not (op.random or op.opaque or op.writes)
    return plain and len(op.inputs) == 1 and op.category in (Category.COPY, Category.POINTWISE)
