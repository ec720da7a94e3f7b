"""The dependency graph: what must run before what, and why.

networkx stays behind this door. Nodes are op names with one attribute ``op``; an edge carries the *set* of its kinds,
so that an ordering edge never overwrites a data edge between the same pair. The graph is frozen after it is built.
"""

from __future__ import annotations

import enum
import itertools
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


@dataclass(frozen=True)
class DepGraph:
    """A frozen ``networkx.DiGraph`` over the ops of one program; edges point from first to second."""

    program: Program
    graph: nx.DiGraph

    def kinds(self, first: str, second: str) -> frozenset[EdgeKind]:
        """Why ``first`` must run before ``second`` (empty if no direct edge)."""
        data = self.graph.get_edge_data(first, second)
        return frozenset() if data is None else data["kinds"]

    def of_order(self, program: Program) -> DepGraph:
        """The dependencies of the program with the same ops in another order that keeps them: they are the same."""
        return DepGraph(program, self.graph)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each position in the order as written, the positions of its direct predecessors, ascending."""
        index = self.program.index
        return tuple(tuple(sorted(index[name] for name in self.graph.pred[op.name])) for op in self.program.ops)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each position in the order as written, the positions of its direct successors, ascending."""
        index = self.program.index
        return tuple(tuple(sorted(index[name] for name in self.graph.succ[op.name])) for op in self.program.ops)


def build_dag(program: Program) -> DepGraph:
    """The dependency graph, in time linear in ops plus edges; no transitive closure is taken. Built once per program."""
    return once(program, _build)


def _build(program: Program) -> DepGraph:
    graph = nx.DiGraph()
    for op in program.ops:
        graph.add_node(op.name, op=op)
    _add_data(graph, program)
    _add_mutation(graph, program)
    _chain(graph, [op for op in program.ops if op.random], EdgeKind.RANDOM)
    if not program.activations_free:
        _chain(graph, [op for op in program.launches if _is_activation(op)], EdgeKind.ACTIVATION)
    if program.launches_fixed:
        _chain(graph, list(program.launches), EdgeKind.LAUNCH)
        for launch, waits in waited_before(program).items():
            for wait in waits:
                _link(graph, wait, launch, EdgeKind.IN_FLIGHT)
    _add_fences(graph, program)
    return DepGraph(program, nx.freeze(graph))


def _is_activation(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is Role.ACTIVATION


def _link(graph: nx.DiGraph, first: str, second: str, kind: EdgeKind) -> None:
    kinds = graph.get_edge_data(first, second, {}).get("kinds", frozenset())
    graph.add_edge(first, second, kinds=kinds | {kind})


def _chain(graph: nx.DiGraph, ops: list[OpNode], kind: EdgeKind) -> None:
    for first, second in itertools.pairwise(ops):
        _link(graph, first.name, second.name, kind)


def _add_data(graph: nx.DiGraph, program: Program) -> None:
    for op in program.ops:
        for name in op.inputs:
            _link(graph, name, op.name, EdgeKind.DATA)


def _add_mutation(graph: nx.DiGraph, program: Program) -> None:
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
                _link(graph, previous, op.name, EdgeKind.MUTATION)
            if storage in op.writes:
                for reader in reads_since[storage]:
                    _link(graph, reader, op.name, EdgeKind.MUTATION)
                reads_since[storage] = []
                last_write[storage] = op.name
            else:
                reads_since[storage].append(op.name)


def _add_fences(graph: nx.DiGraph, program: Program) -> None:
    """Nothing that communicates, draws, writes or is opaque itself crosses an opaque op."""
    fence: str | None = None
    since: list[str] = []
    for op in program.ops:
        bound = op.opaque or op.random or bool(op.writes) or op.kind in (OpKind.LAUNCH, OpKind.WAIT)
        if not bound:
            continue
        if fence is not None:
            _link(graph, fence, op.name, EdgeKind.EFFECT)
        if op.opaque:
            for name in since:
                _link(graph, name, op.name, EdgeKind.EFFECT)
            fence, since = op.name, []
        else:
            since.append(op.name)
