"""The dependency graph: what must run before what, and why.

networkx stays behind this door, and is asked for only by who wants to look at the graph. Nodes are op names with one
attribute ``op``; an edge carries the *set* of its kinds, so that an ordering edge never overwrites a data edge between the
same pair. The graph is frozen.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import networkx as nx

from overlap_pass.graph.in_flight import waited_before
from overlap_pass.graph.once import once
from overlap_pass.graph.program import OpKind, OpNode, Program, Role

__all__ = ["DepGraph", "EdgeKind", "build_dag"]


class EdgeKind(enum.StrEnum):
    DATA = "data"
    """Reads the other's result."""
    MUTATION = "mutation"
    """One of the two writes memory that both touch (through views and aliases)."""
    RANDOM = "random"
    """Both consume the random state."""
    EFFECT = "effect"
    """One of the two is opaque: the other (opaque, random, mutating or communicating) may not cross it."""
    ACTIVATION = "activation"
    """Both are launches of activation collectives, which keep their order over all groups."""
    LAUNCH = "launch"
    """Both are launches of a program whose launches keep their order (``Program.launches_fixed``)."""
    IN_FLIGHT = "in flight"
    """A wait, and a launch on another communicator that must not be in flight beside it (``Program.most_in_flight``)."""
    PLACE = "place"
    """A reader of a gathered parameter, and the launch that takes its place in shared memory (``Program.leases``)."""


_Edges = dict[tuple[str, str], frozenset[EdgeKind]]


@dataclass(frozen=True)
class DepGraph:
    """What must run before what in one program.

    Attributes:
        ordering: edges that are of more than data (or not of data at all), from first to second.
    """

    program: Program
    ordering: Mapping[tuple[str, str], frozenset[EdgeKind]]

    def kinds(self, first: str, second: str) -> frozenset[EdgeKind]:
        """Why ``first`` must run before ``second`` (empty if no direct edge)."""
        data = frozenset({EdgeKind.DATA} if first in self.program.op(second).inputs else ())
        return data | self.ordering.get((first, second), frozenset())

    def of_order(self, program: Program) -> DepGraph:
        """The dependencies of the program with the same ops in another order that keeps them: they are the same."""
        return DepGraph(program, self.ordering)

    @cached_property
    def graph(self) -> nx.DiGraph:
        """As a frozen ``networkx.DiGraph`` over the ops; edges point from first to second."""
        graph = nx.DiGraph()
        for op in self.program.ops:
            graph.add_node(op.name, op=op)
        pairs = ((name, op.name) for op in self.program.ops for name in op.inputs)
        for pair in dict.fromkeys((*pairs, *self.ordering)):
            graph.add_edge(*pair, kinds=self.kinds(*pair))
        return nx.freeze(graph)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each position in the order as written, the positions of its direct predecessors, ascending."""
        index = self.program.index
        found = [[index[name] for name in op.inputs] for op in self.program.ops]
        for first, second in self.ordering:
            found[index[second]].append(index[first])
        return tuple([tuple(sorted(set(some))) if len(some) > 1 else tuple(some) for some in found])

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each position in the order as written, the positions of its direct successors, ascending."""
        found: list[list[int]] = [[] for _ in self.program.ops]
        for position, predecessors in enumerate(self.predecessors):
            for predecessor in predecessors:
                found[predecessor].append(position)
        return tuple(map(tuple, found))


def build_dag(program: Program) -> DepGraph:
    """The dependency graph, in time linear in ops plus edges; no transitive closure is taken. Built once per program."""
    return once(program, _build)


def _build(program: Program) -> DepGraph:
    edges: _Edges = {}
    _add_mutation(edges, program)
    _chain(edges, [op for op in program.ops if op.random], EdgeKind.RANDOM)
    if not program.activations_free:
        _chain(edges, [op for op in program.launches if _is_activation(op)], EdgeKind.ACTIVATION)
    if program.launches_fixed:
        _chain(edges, list(program.launches), EdgeKind.LAUNCH)
        for launch, waits in waited_before(program).items():
            for wait in waits:
                _link(edges, wait, launch, EdgeKind.IN_FLIGHT)
    for launch, lease in program.leases.items():
        for reader in lease.behind:
            _link(edges, reader, launch, EdgeKind.PLACE)
    _add_fences(edges, program)
    return DepGraph(program, edges)


def _is_activation(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is Role.ACTIVATION


def _link(edges: _Edges, first: str, second: str, kind: EdgeKind) -> None:
    edges[first, second] = edges.get((first, second), frozenset()) | {kind}


def _chain(edges: _Edges, ops: list[OpNode], kind: EdgeKind) -> None:
    for first, second in itertools.pairwise(ops):
        _link(edges, first.name, second.name, kind)


def _add_mutation(edges: _Edges, program: Program) -> None:
    """Order every write against the reads and writes of the same storage on both sides of it.

    A collective reads its input until its wait, and its output is written until then: both count as touched there.
    """
    written = {storage for op in program.ops for storage in op.writes}
    if not written:
        return
    last_write: dict[int, str] = {}
    reads_since: dict[int, list[str]] = {storage: [] for storage in written}
    for op in program.ops:
        for storage in sorted(program.touched(op) & written):
            previous = last_write.get(storage)
            if previous is not None and previous != op.name:
                _link(edges, previous, op.name, EdgeKind.MUTATION)
            if storage in op.writes:
                for reader in reads_since[storage]:
                    _link(edges, reader, op.name, EdgeKind.MUTATION)
                reads_since[storage] = []
                last_write[storage] = op.name
            else:
                reads_since[storage].append(op.name)


def _add_fences(edges: _Edges, program: Program) -> None:
    """Nothing that communicates, draws, writes or is opaque itself crosses an opaque op."""
    fence: str | None = None
    since: list[str] = []
    for op in program.ops:
        bound = op.opaque or op.random or bool(op.writes) or op.kind in (OpKind.LAUNCH, OpKind.WAIT)
        if not bound:
            continue
        if fence is not None:
            _link(edges, fence, op.name, EdgeKind.EFFECT)
        if op.opaque:
            for name in since:
                _link(edges, name, op.name, EdgeKind.EFFECT)
            fence, since = op.name, []
        else:
            since.append(op.name)
