"""What compute ops cost: rooflines, and clusters of ops that the compiler fuses into one kernel.

A kernel takes ``start + max(flops / (peak * efficiency), traffic / (bandwidth * efficiency))``. The start (a matmul's
*ramp*, see :class:`~overlap_pass.cost.hardware.Compute`) is what makes small matmuls inefficient: at ``flops`` equal to
``ramp * peak * efficiency`` half of the efficiency is left. It is the whole formula for size; shapes that fill the device
badly (very thin matmuls) are covered only by their traffic.

Pointwise ops, copies and reductions fuse along producer → consumer edges, views between them included. A cluster is
charged once for its start, once for each result from outside that it reads, and once for each result that it has to
store; what passes between its members never reaches memory. Two ops share a cluster only if no other kernel or collective
lies on any path between them, as the fused kernel would have to run before and after that one. To see this in linear
time every op has a *stage*, the number of such barriers on the longest path to it: along an edge the stage never falls
and a barrier raises it, so a path that leaves a cluster through a barrier cannot come back to the same stage.

A pointwise result that only fusible ops read is not stored for those of other clusters either: each of them computes it
again from what it is made of, as Inductor does unless that is many reads. So a cast or an activation that a matmul
stands behind is read at its own size and not at that of its fp32 intermediates, and a cluster of nothing else is no
kernel at all.

This is coarser than the compiler: it does not ask whether iteration spaces agree and does not fuse into matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlap_pass.cost.hardware import Hardware
from overlap_pass.graph.program import Category, OpKind, OpNode, Program

__all__ = ["Cluster", "clusters", "is_unknown", "kernel_us", "member_us"]

_REPEATED_READS = 4
"""A result of more reads than this is stored if several ops read it (Inductor's ``realize_reads_threshold``)."""
_INLINED_READS = 8
"""A result of more reads than this is stored in any case (Inductor's ``realize_acc_reads_threshold``)."""

_LOOK_UPS = frozenset({"aten.embedding.default", "aten.gather.default", "aten.index.Tensor", "aten.scatter.value"})
"""Computed for each element of the result where it is read; a scatter of one value is so where it goes into a constant."""

_NEED_FLOPS = (Category.MATMUL, Category.ATTENTION, Category.OTHER, Category.NONE)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ops that run as one kernel.

    Attributes:
        members: names in the order as written; the first one stands for the launch.
        traffic_bytes: for each member, what it moves through memory as part of the cluster.
        unstored: members whose results never reach memory: only other members read them, or every reader computes them again.
        sources: ops outside whose results the kernel reads, seen through what it computes again.
        runs: there is a kernel; not where other clusters compute all of it again for themselves.
    """

    members: tuple[str, ...]
    traffic_bytes: tuple[float, ...]
    unstored: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    runs: bool = True


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
    read_bytes = op.read_bytes
    if op.category is Category.INDEX:  # picks: reads no more of a table than it hands on, and as many indices at most
        read_bytes = min(read_bytes, 2 * op.written_bytes)
    work_us = (op.flops or 0) / (hardware.peak_flops_per_us(op.dtype) * efficiency)
    return start_us + max(work_us, hardware.traffic_us(read_bytes + op.written_bytes))


def member_us(cluster: Cluster, hardware: Hardware) -> tuple[float, ...]:
    """Share of each member in the time of its cluster: its own traffic, and for the first one the kernel's start."""
    shares = [hardware.traffic_us(traffic_bytes) for traffic_bytes in cluster.traffic_bytes]
    shares[0] += hardware.compute.kernel_us if cluster.runs else 0.0
    return tuple(shares)


def clusters(program: Program, *, indexed: bool = False) -> tuple[Cluster, ...]:
    """All clusters of fusible ops, those of one member included, in the order of their first members.

    Args:
        indexed: look-ups fuse like pointwise ops, as in Inductor's code. Prices leave them alone: their traffic is not that
            of what they look up in.
    """
    return _Fusion(_looked_up(program) if indexed else program).clusters()


def _looked_up(program: Program) -> Program:
    """The program with look-ups as pointwise ops."""
    ops = (replace(op, category=Category.POINTWISE) if op.target in _LOOK_UPS else op for op in program.ops)
    return replace(program, ops=tuple(ops))


class _Fusion:
    """What is known of a program's fusible ops, by position.

    Attributes:
        source: op → the op that made its result, seen through views.
        readers: op → the ops that read its result, through views.
        lead: fusible op → first member of its cluster.
        reads: fusible op that a kernel runs for → what it reads, op → bytes. Ops that are only computed again inside
            others are missing here.
        stored: fusible ops whose result has to be in memory.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.source = _sources(program)
        self.readers = _readers(program, self.source)
        self.lead = _leads(program, self.source)
        self.reads = self._reads()
        self.stored = self._stored()

    def clusters(self) -> tuple[Cluster, ...]:
        members: dict[int, list[int]] = {}
        for position, first in self.lead.items():
            members.setdefault(first, []).append(position)
        return tuple(self._cluster(positions) for positions in members.values())

    def _cluster(self, positions: list[int]) -> Cluster:
        ops = self.program.ops
        return Cluster(
            members=tuple(ops[position].name for position in positions),
            traffic_bytes=self._traffic(positions),
            unstored=tuple(ops[position].name for position in positions if position not in self.stored),
            sources=self._sources_of(positions),
            runs=any(position in self.reads for position in positions),
        )

    def _sources_of(self, positions: list[int]) -> tuple[str, ...]:
        leaves = (leaf for position in positions for leaf in self.reads.get(position, ()))
        own = self.lead[positions[0]]
        return tuple(dict.fromkeys(self.program.ops[leaf].name for leaf in leaves if self.lead.get(leaf) != own))

    def _reads(self) -> dict[int, dict[int, float]]:
        reads: dict[int, dict[int, float]] = {}
        inlined: dict[int, dict[int, float]] = {}
        for position in sorted(self.lead):
            own: dict[int, float] = {}
            for base, read_bytes in _shares(self.program, self.source, self.program.ops[position]):
                for leaf, leaf_bytes in inlined.get(base, {base: read_bytes}).items():
                    own[leaf] = max(own.get(leaf, 0.0), leaf_bytes)
            again = self._can_be_repeated(position) and len(own) <= (
                _INLINED_READS if len(self.readers[position]) == 1 else _REPEATED_READS
            )
            (inlined if again else reads)[position] = own
        return reads

    def _can_be_repeated(self, position: int) -> bool:
        """Cheap for each element, the same each time, and read by nothing that needs it in memory."""
        op = self.program.ops[position]
        repeatable = op.category is not Category.REDUCTION and not op.writes and not op.random
        return repeatable and all(reader in self.lead for reader in self.readers[position])

    def _stored(self) -> set[int]:
        """Written in place, or read by another kernel."""
        stored = {position for position in self.reads if self.program.ops[position].writes}
        stored |= {position for position in self.reads if any(one not in self.lead for one in self.readers[position])}
        for position, leaves in self.reads.items():
            stored |= {leaf for leaf in leaves if leaf in self.lead and self.lead[leaf] != self.lead[position]}
        return stored

    def _traffic(self, positions: list[int]) -> tuple[float, ...]:
        """Bytes that each member moves: what no member before it has read, and its result if that is stored."""
        seen: set[int] = set()
        traffic_bytes = []
        for position in positions:
            moved_bytes = float(self.program.ops[position].written_bytes) if position in self.stored else 0.0
            for leaf, read_bytes in self.reads.get(position, {}).items():
                if self.lead.get(leaf) != self.lead[position] and leaf not in seen:
                    moved_bytes += read_bytes
                    seen.add(leaf)
            traffic_bytes.append(moved_bytes)
        return tuple(traffic_bytes)


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


def _readers(program: Program, source: list[int]) -> list[list[int]]:
    """For each op the ops that read its result, through views."""
    readers: list[list[int]] = [[] for _ in program.ops]
    for position, op in enumerate(program.ops):
        if op.kind is not OpKind.VIEW:
            for base in dict.fromkeys(source[program.index[name]] for name in op.inputs):
                readers[base].append(position)
    return readers


def _shares(program: Program, source: list[int], op: OpNode) -> list[tuple[int, float]]:
    """The op's read traffic shared out over its inputs in proportion to their storages, which is all that is known."""
    bases = list(dict.fromkeys(source[program.index[name]] for name in op.inputs))
    sizes = [sum(program.storages[storage].size_bytes for storage in program.ops[base].storages) for base in bases]
    total_bytes = sum(sizes)
    if not total_bytes:
        return []
    return [(base, op.read_bytes * size / total_bytes) for base, size in zip(bases, sizes, strict=True)]
