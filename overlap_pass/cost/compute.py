"""What compute ops cost: rooflines, and clusters of ops that the compiler fuses into one kernel.

A kernel takes ``start + max(flops / (peak * efficiency), traffic / (bandwidth * efficiency))``. The start (a matmul's
*ramp*, see :class:`~overlap_pass.cost.hardware.Compute`) is what makes small matmuls inefficient: at ``flops`` equal to
``ramp * peak * efficiency`` half of the efficiency is left. It is the whole formula for size; shapes that fill the device
badly (very thin matmuls) are covered only by their traffic.

Pointwise ops and reductions fuse along producer → consumer edges, views between them included. A cluster is charged
once for its start, once for each result from outside that it reads, and once for each result that is read outside;
what passes between its members never reaches memory. Two ops share a cluster only if no other kernel or collective
lies on any path between them, as the fused kernel would have to run before and after that one. To see this in linear
time every op has a *stage*, the number of such barriers on the longest path to it: along an edge the stage never falls
and a barrier raises it, so a path that leaves a cluster through a barrier cannot come back to the same stage.

This is coarser than the compiler: it does not ask whether iteration spaces agree and does not fuse into matmuls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap_pass.cost.hardware import Hardware
from overlap_pass.graph.program import Category, OpKind, OpNode, Program

__all__ = ["Cluster", "clusters", "is_unknown", "kernel_us", "member_us"]

_NEED_FLOPS = (Category.MATMUL, Category.ATTENTION, Category.OTHER, Category.NONE)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ops that run as one kernel.

    Attributes:
        members: names in the order as written; the first one stands for the launch.
        traffic_bytes: for each member, what it moves through memory as part of the cluster.
        internal: members whose results only other members read, so that they never reach memory.
    """

    members: tuple[str, ...]
    traffic_bytes: tuple[float, ...]
    internal: tuple[str, ...] = ()


def is_unknown(op: OpNode) -> bool:
    """No formula covers the op: its work is unknown and its traffic alone does not tell its time."""
    return op.kind is OpKind.COMPUTE and op.flops is None and op.category in _NEED_FLOPS


def kernel_us(op: OpNode, hardware: Hardware) -> float:
    """Time of one op as a kernel of its own, from its work, dtype and traffic."""
    compute = hardware.compute
    start_us, efficiency = compute.kernel_us, compute.matmul_efficiency
    if op.category is Category.MATMUL:
        start_us = compute.matmul_ramp_us
    elif op.category is Category.ATTENTION:
        start_us, efficiency = compute.matmul_ramp_us, compute.attention_efficiency
    work_us = (op.flops or 0) / (hardware.peak_flops_per_us(op.dtype) * efficiency)
    return start_us + max(work_us, hardware.traffic_us(op.read_bytes + op.written_bytes))


def member_us(cluster: Cluster, hardware: Hardware) -> tuple[float, ...]:
    """Share of each member in the time of its cluster: its own traffic, and for the first one the kernel's start."""
    shares = [hardware.traffic_us(traffic_bytes) for traffic_bytes in cluster.traffic_bytes]
    shares[0] += hardware.compute.kernel_us
    return tuple(shares)


def clusters(program: Program) -> tuple[Cluster, ...]:
    """All clusters of fusible ops, those of one member included, in the order of their first members."""
    source = _sources(program)
    lead = _leads(program, source)
    members: dict[int, list[int]] = {}
    for position, first in lead.items():
        members.setdefault(first, []).append(position)
    escapes = _read_outside(program, source, lead)
    return tuple(_cluster(program, source, lead, positions, escapes) for positions in members.values())


def _sources(program: Program) -> list[int]:
    """For each op the position of the op that made its result, seen through views."""
    source = list(range(len(program.ops)))
    for position, op in enumerate(program.ops):
        if op.kind is OpKind.VIEW and op.inputs:
            source[position] = source[program.index[op.inputs[0]]]
    return source


def _leads(program: Program, source: list[int]) -> dict[int, int]:
    """Fusible op → first member of its cluster, by position: a union of each op with its producers in its stage."""
    stage = [0] * len(program.ops)
    lead: dict[int, int] = {}
    for position, op in enumerate(program.ops):
        producers = [program.index[name] for name in op.inputs]
        reached = max((stage[producer] for producer in producers), default=0)
        if op.kind in (OpKind.LAUNCH, OpKind.WAIT) or (op.kind is OpKind.COMPUTE and not _fusible(op)):
            reached += 1
        stage[position] = reached
        if not _fusible(op):
            continue
        lead[position] = position
        for producer in producers:
            base = source[producer]
            if base in lead and stage[base] == reached:
                _join(lead, base, position)
    return {position: _find(lead, position) for position in lead}


def _fusible(op: OpNode) -> bool:
    return op.kind is OpKind.COMPUTE and op.category.fusible and not op.opaque


def _find(lead: dict[int, int], position: int) -> int:
    while lead[position] != position:
        lead[position] = lead[lead[position]]  # halves the path, which keeps all of this linear in practice
        position = lead[position]
    return position


def _join(lead: dict[int, int], first: int, second: int) -> None:
    one, other = _find(lead, first), _find(lead, second)
    lead[max(one, other)] = min(one, other)


def _read_outside(program: Program, source: list[int], lead: Mapping[int, int]) -> set[int]:
    """Members whose result something outside their cluster reads, so that it has to be written."""
    escapes: set[int] = set()
    for position, op in enumerate(program.ops):
        if op.kind is OpKind.VIEW:
            continue
        for name in op.inputs:
            base = source[program.index[name]]
            if base in lead and lead.get(position) != lead[base]:
                escapes.add(base)
    return escapes


def _cluster(
    program: Program, source: list[int], lead: Mapping[int, int], positions: list[int], escapes: set[int]
) -> Cluster:
    seen: set[int] = set()
    members, traffic_bytes, internal = [], [], []
    for position in positions:
        op = program.ops[position]
        written = position in escapes or bool(op.writes)
        moved_bytes = float(op.written_bytes) if written else 0.0
        for base, read_bytes in _reads(program, source, op):
            if lead.get(base) != lead[position] and base not in seen:
                moved_bytes += read_bytes
                seen.add(base)
        members.append(op.name)
        traffic_bytes.append(moved_bytes)
        if not written:
            internal.append(op.name)
    return Cluster(tuple(members), tuple(traffic_bytes), tuple(internal))


def _reads(program: Program, source: list[int], op: OpNode) -> list[tuple[int, float]]:
    """The op's read traffic shared out over its inputs in proportion to their storages, which is all that is known."""
    bases = list(dict.fromkeys(source[program.index[name]] for name in op.inputs))
    sizes = [sum(program.storages[storage].size_bytes for storage in program.ops[base].storages) for base in bases]
    total_bytes = sum(sizes)
    if not total_bytes:
        return []
    return [(base, op.read_bytes * size / total_bytes) for base, size in zip(bases, sizes, strict=True)]
