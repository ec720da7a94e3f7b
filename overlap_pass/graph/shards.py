"""Shards counted as the largest rank holds them, so that all ranks plan from the same figures.

FSDP cuts the rows of a parameter into equal parts; where the number of ranks does not divide them, the last ranks hold
fewer, or none, and pad what they send::

    full rank    shard [4] ─────────▶ gather       reduction ─▶ wait ──────────────▶ cast [4] ─▶ output
    short rank   shard [3] ─ pad ───▶ gather       reduction ─▶ wait ─ slice [:3] ─▶ cast [3] ─▶ output

Read as they stand, these graphs differ in sizes, and in whether they pad at all (compilers drop a pad of no rows).
Budgets, prices and in the end the order of launches would differ between ranks, which is a hang. But what travels has
one size everywhere, so the sizes of shards are taken from there. A pad is read as a view of what it pads, which costs
nothing; where nothing else copies the shard on its way, the copy is charged to the launch, on every rank. A parameter
that the graph is given and does not read is of unknown size and counts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from overlap_pass.graph.program import OpKind, OpNode, Role, Storage
from overlap_pass.graph.roles import moves_data

__all__ = ["Extent", "on_the_largest_rank"]


@dataclass(frozen=True, slots=True)
class Extent:
    """How large the result of an op is on this rank: elements, and bytes of each."""

    elements: int
    itemsize: int


def on_the_largest_rank(
    ops: Sequence[OpNode], storages: Sequence[Storage], extents: Mapping[str, Extent], padded: Collection[str]
) -> tuple[tuple[OpNode, ...], tuple[Storage, ...]]:
    """The same graph with the shards of the rank that holds the most.

    Args:
        ops: in order, with the roles of collectives assigned.
        extents: op → extent of its result on this rank.
        padded: launches that some rank pads for, also where this rank's pad was dropped.
    """
    by_name = {op.name: op for op in ops}
    readers = _readers(ops)
    elements: dict[str, int] = {}
    copied_to_send: list[OpNode] = []
    for op in ops:
        if op.collective is None or len(op.inputs) != 1:
            continue
        if op.collective.role is Role.PARAMETER:
            head = _head(op, by_name, extents)
            elements.update(dict.fromkeys((one.name for one in head), extents[head[0].name].elements))
            if _copies_nothing(head) and (op.name in padded or any(map(_pads, head))):
                copied_to_send.append(op)
        elif op.collective.role is Role.GRADIENT:
            wait, *tail = _tail(op, readers, extents)
            elements.update(dict.fromkeys((one.name for one in tail), extents[wait.name].elements))
    held = (storage.owner for storage in storages if storage.held)
    elements.update({name: 0 for name in held if all(reader.kind is OpKind.OUTPUT for reader in readers[name])})
    counted = {op.name: _counted(op, by_name, elements, extents) for op in ops}
    resized = [_resized(storage, by_name, elements, extents) for storage in storages]
    for launch in copied_to_send:
        resized.append(Storage(len(resized), launch.read_bytes, launch.name))
        counted[launch.name] = replace(launch, storages=(*launch.storages, resized[-1].id))
    return tuple(counted.values()), tuple(resized)


def _readers(ops: Sequence[OpNode]) -> dict[str, list[OpNode]]:
    readers: dict[str, list[OpNode]] = {op.name: [] for op in ops}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op)
    return readers


def _head(launch: OpNode, by_name: Mapping[str, OpNode], extents: Mapping[str, Extent]) -> list[OpNode]:
    """What is sent, and back from there to the shard: views, casts, pads."""
    chain = [by_name[launch.inputs[0]]]
    while _hands_on(op := chain[-1]):
        source = by_name[op.inputs[0]]
        if extents[source.name].elements != extents[op.name].elements and not _pads(op):
            break  # a part of something larger, which is no shard
        chain.append(source)
    return chain


def _tail(launch: OpNode, readers: Mapping[str, list[OpNode]], extents: Mapping[str, Extent]) -> list[OpNode]:
    """The wait, and on from there to the gradient of the shard: slices, divisions, casts."""
    chain = [launch]
    while len(following := readers[chain[-1].name]) == 1:
        (op,) = following
        if op.kind is not OpKind.WAIT and not _hands_on(op):
            break
        if op.kind is not OpKind.WAIT and extents[op.name].elements > extents[chain[-1].name].elements:
            break
        chain.append(op)
    return chain[1:] or chain


def _hands_on(op: OpNode) -> bool:
    return op.kind in (OpKind.COMPUTE, OpKind.VIEW) and len(op.inputs) == 1 and moves_data(op)


def _pads(op: OpNode) -> bool:
    return op.kind is OpKind.COMPUTE and "constant_pad_nd" in op.target


def _copies_nothing(head: Sequence[OpNode]) -> bool:
    return all(op.kind is not OpKind.COMPUTE or _pads(op) for op in head)


def _counted(
    op: OpNode, by_name: Mapping[str, OpNode], elements: Mapping[str, int], extents: Mapping[str, Extent]
) -> OpNode:
    if op.name not in elements:
        return op
    if _pads(op):
        source = by_name[op.inputs[0]]
        return OpNode(op.name, OpKind.VIEW, op.target, op.inputs, source.storages)
    if op.kind is not OpKind.COMPUTE:
        return op
    count = elements[op.name]
    return replace(
        op, read_bytes=count * extents[op.inputs[0]].itemsize, written_bytes=count * extents[op.name].itemsize
    )


def _resized(
    storage: Storage, by_name: Mapping[str, OpNode], elements: Mapping[str, int], extents: Mapping[str, Extent]
) -> Storage:
    if storage.owner not in elements:
        return storage
    if not elements[storage.owner] or _pads(by_name[storage.owner]):
        return replace(storage, size_bytes=0)
    size_bytes = elements[storage.owner] * extents[storage.owner].itemsize
    return replace(storage, size_bytes=max(storage.size_bytes, size_bytes))
