"""Hand-made programs for tests, prices for them, and hypothesis strategies for random ones like FSDP's.

build = Builder()
x, shard = build.input("x", 8), build.input("shard", 4, held=True)
gather = build.all_gather("gather", shard, 8)
weight = build.wait("weight", gather)
program = build.output(build.compute("y", x, weight, size_bytes=8))
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.program import (
    Category,
    Collective,
    CollectiveKind,
    OpKind,
    OpNode,
    Phase,
    Program,
    Role,
    Storage,
)

__all__ = ["Builder", "contentions", "fsdp_programs", "legal_orders", "priced", "prices", "random_order"]


class Builder:
    """Builds a program op by op; every method returns the op's name, to be read by later ops."""

    def __init__(self, name: str = "program", phase: Phase = Phase.FORWARD) -> None:
        self._name, self._phase = name, phase
        self._ops: dict[str, OpNode] = {}
        self._storages: list[Storage] = []
        self._groups: dict[str, int] = {}

    def input(self, name: str, size_bytes: int = 0, *, held: bool = False) -> str:
        storages = self._allocate(name, size_bytes, held=held)
        return self._add(OpNode(name, OpKind.INPUT, "input", storages=storages))

    def chain(self, count: int) -> tuple[Program, list[str]]:
        """The whole program: ops that each read the one before; and their names."""
        value, names = self.input("x"), [f"op{number}" for number in range(count)]
        for name in names:
            value = self.compute(name, value)
        return self.output(value), names

    def compute(
        self,
        name: str,
        *inputs: str,
        size_bytes: int = 0,
        category: Category = Category.MATMUL,
        flops: int | None = 0,
        random: bool = False,
        opaque: bool = False,
    ) -> str:
        """An op that allocates ``size_bytes`` and reads all of its inputs."""
        return self._add(
            OpNode(
                name,
                OpKind.COMPUTE,
                f"test.{category}",
                inputs,
                self._allocate(name, size_bytes),
                category=category,
                dtype="bfloat16",
                flops=flops,
                read_bytes=sum(self._bytes(source) for source in inputs),
                written_bytes=size_bytes,
                random=random,
                opaque=opaque,
            )
        )

    def cast(self, name: str, source: str, size_bytes: int = 0) -> str:
        return self.compute(name, source, size_bytes=size_bytes, category=Category.POINTWISE)

    def view(self, name: str, base: str) -> str:
        return self._add(OpNode(name, OpKind.VIEW, "test.view", (base,), self._ops[base].storages))

    def in_place(self, name: str, changed: str, *inputs: str) -> str:
        """A pointwise op that overwrites ``changed``."""
        storages = self._ops[changed].storages
        sources = (changed, *(source for source in inputs if source != changed))
        moved_bytes = sum(self._bytes(source) for source in sources)
        return self._add(
            OpNode(name, OpKind.COMPUTE, "test.in_place", sources, storages, storages, Category.POINTWISE, "bfloat16",
                   read_bytes=moved_bytes, written_bytes=self._bytes(changed))
        )  # fmt: skip

    def launch(
        self, name: str, source: str, kind: CollectiveKind, role: Role, *, size_bytes: int = 0, group: str = "g0"
    ) -> str:
        """A collective on two ranks whose result takes ``size_bytes``."""
        payload_bytes = max(size_bytes, self._bytes(source))
        return self._launch(name, source, Collective(kind, group, 2, payload_bytes, "bfloat16", role), size_bytes)

    def all_gather(
        self, name: str, shard: str, size_bytes: int = 0, *, group: str = "g0", unit: str | None = None
    ) -> str:
        """Gathers a parameter of ``unit``."""
        kind, payload_bytes = CollectiveKind.ALL_GATHER, max(size_bytes, self._bytes(shard))
        collective = Collective(kind, group, 2, payload_bytes, "bfloat16", Role.PARAMETER, unit)
        return self._launch(name, shard, collective, size_bytes)

    def reduce_scatter(self, name: str, gradient: str, size_bytes: int = 0, *, group: str = "g0") -> str:
        return self.launch(
            name, gradient, CollectiveKind.REDUCE_SCATTER, Role.GRADIENT, size_bytes=size_bytes, group=group
        )

    def wait(self, name: str, launch: str) -> str:
        storages = self._ops[launch].storages
        return self._add(OpNode(name, OpKind.WAIT, "test.wait", (launch,), storages, launch=launch))

    def output(self, *returned: str) -> Program:
        self._add(OpNode("output", OpKind.OUTPUT, "output", returned))
        return Program(self._name, self._phase, tuple(self._ops.values()), tuple(self._storages), dict(self._groups))

    def _launch(self, name: str, source: str, collective: Collective, size_bytes: int) -> str:
        self._groups[collective.group] = collective.group_size
        return self._add(
            OpNode(
                name,
                OpKind.LAUNCH,
                f"test.{collective.kind}",
                (source,),
                self._allocate(name, size_bytes),
                read_bytes=self._bytes(source),
                written_bytes=size_bytes,
                collective=collective,
            )
        )

    def _add(self, op: OpNode) -> str:
        if op.name in self._ops:
            raise ValueError(f"two ops are called {op.name}")
        self._ops[op.name] = op
        return op.name

    def _allocate(self, owner: str, size_bytes: int, *, held: bool = False) -> tuple[int, ...]:
        self._storages.append(Storage(len(self._storages), size_bytes, owner, held))
        return (len(self._storages) - 1,)

    def _bytes(self, name: str) -> int:
        return sum(self._storages[storage].size_bytes for storage in self._ops[name].storages)


def prices(
    program: Program,
    duration_us: Mapping[str, float],
    *,
    launch_us: Mapping[str, float] | None = None,
    contention: Contention | None = None,
) -> CostTable:
    """A cost table by hand: what is not named costs nothing."""
    return CostTable(
        {**dict.fromkeys(program.order, 0.0), **duration_us},
        {**dict.fromkeys(program.order, 0.0), **(launch_us or {})},
        contention or Contention(),
    )


def legal_orders(dag: DepGraph, fixed: Collection[str] = ()) -> Iterator[tuple[str, ...]]:
    """Every order that the dependency graph allows, inputs first and output last, ``fixed`` in their order as written."""
    program = dag.program
    missing = _missing(dag, fixed)
    order: list[int] = []

    def extend() -> Iterator[tuple[str, ...]]:
        if len(order) == len(program.ops):
            yield tuple(program.ops[position].name for position in order)
        for position in sorted(ready):
            ready.remove(position)
            order.append(position)
            freed = _run(position, missing)
            ready.update(freed)
            yield from extend()
            ready.difference_update(freed)
            for successor in missing.successors[position]:
                missing.count[successor] += 1
            order.pop()
            ready.add(position)

    ready = {position for position, count in enumerate(missing.count) if not count}
    yield from extend()


def random_order(dag: DepGraph, draws: random.Random, fixed: Collection[str] = ()) -> tuple[str, ...]:
    """One of :func:`legal_orders`, drawn step by step."""
    missing = _missing(dag, fixed)
    ready = [position for position, count in enumerate(missing.count) if not count]
    order: list[str] = []
    while ready:
        position = ready.pop(draws.randrange(len(ready)))
        order.append(dag.program.ops[position].name)
        ready.extend(_run(position, missing))
    return tuple(order)


class _Missing:
    """How many predecessors each op still waits for."""

    def __init__(self, successors: list[set[int]]) -> None:
        self.successors = [sorted(found) for found in successors]
        self.count = [0] * len(successors)
        for found in successors:
            for successor in found:
                self.count[successor] += 1


def _missing(dag: DepGraph, fixed: Collection[str]) -> _Missing:
    """The dependency graph plus: inputs run first in their order, the output last, ``fixed`` as written."""
    ops = dag.program.ops
    successors = [set(found) for found in dag.successors]
    inputs = [position for position, op in enumerate(ops) if op.kind is OpKind.INPUT]
    others = [position for position, op in enumerate(ops) if op.kind is not OpKind.INPUT]
    kept = [position for position, op in enumerate(ops) if op.name in fixed]
    for first, second in [*itertools.pairwise(inputs), *itertools.pairwise(kept)]:
        successors[first].add(second)
    for position in others[:-1]:
        successors[others[-1]].discard(position)
        successors[position].add(others[-1])
        if inputs:
            successors[inputs[-1]].add(position)
    return _Missing(successors)


def _run(position: int, missing: _Missing) -> list[int]:
    for successor in missing.successors[position]:
        missing.count[successor] -= 1
    return [successor for successor in missing.successors[position] if not missing.count[successor]]


_SIZES = st.integers(0, 9)
_TIMES = st.integers(0, 12).map(float)


@st.composite
def fsdp_programs(draw: st.DrawFn, max_layers: int = 4, groups: tuple[str, ...] = ("g0", "g1")) -> Program:
    """A chain of layers as FSDP runs them, all in a serial order as written.

    Each has some of: cast, gather (with one or two waits), view, matmul, in-place, random, opaque or pointwise op,
    activation all-reduce, gradient with its cast and its reduction (over one group or, as HSDP does, two).
    """
    build = Builder()
    hidden = build.input("x", draw(_SIZES))
    returned = []
    for layer in range(draw(st.integers(1, max_layers))):
        weight = _gathered(draw, build, layer, draw(st.sampled_from(groups)))
        hidden = build.compute(f"mm_{layer}", hidden, weight, size_bytes=draw(_SIZES))
        extra = draw(st.sampled_from(("nothing", "in place", "random", "opaque", "pointwise", "all-reduce")))
        if extra == "in place":
            hidden = build.in_place(f"relu_{layer}", hidden)
        elif extra == "random":
            hidden = build.compute(f"drop_{layer}", hidden, size_bytes=draw(_SIZES), random=True)
        elif extra == "opaque":
            hidden = build.compute(f"custom_{layer}", hidden, size_bytes=draw(_SIZES), flops=None, opaque=True)
        elif extra == "pointwise":
            hidden = build.compute(f"gelu_{layer}", hidden, size_bytes=draw(_SIZES), category=Category.POINTWISE)
        elif extra == "all-reduce":
            reduced = build.launch(
                f"sum_{layer}", hidden, CollectiveKind.ALL_REDUCE, Role.ACTIVATION,
                size_bytes=draw(_SIZES), group=draw(st.sampled_from(groups)),
            )  # fmt: skip
            hidden = build.wait(f"summed_{layer}", reduced)
        if draw(st.booleans()):
            returned.append(_reduced(draw, build, layer, hidden, draw(st.sampled_from(groups))))
    return build.output(hidden, *returned)


def _gathered(draw: st.DrawFn, build: Builder, layer: int, group: str) -> str:
    shard = build.input(f"shard_{layer}", draw(_SIZES), held=draw(st.booleans()))
    if draw(st.booleans()):
        shard = build.cast(f"cast_{layer}", shard, draw(_SIZES))
    gather = build.all_gather(f"gather_{layer}", shard, draw(_SIZES), group=group, unit=f"layers.{layer // 2}")
    weight = build.wait(f"weight_{layer}", gather)
    if draw(st.integers(0, 3)) == 0:
        build.wait(f"again_{layer}", gather)
    return build.view(f"view_{layer}", weight) if draw(st.booleans()) else weight


def _reduced(draw: st.DrawFn, build: Builder, layer: int, hidden: str, group: str) -> str:
    gradient = build.compute(f"grad_{layer}", hidden, size_bytes=draw(_SIZES))
    if draw(st.booleans()):
        gradient = build.cast(f"upcast_{layer}", gradient, draw(_SIZES))
    reduction = build.reduce_scatter(f"reduce_{layer}", gradient, draw(_SIZES), group=group)
    reduced = build.wait(f"reduced_{layer}", reduction)
    if draw(st.integers(0, 3)) == 0:
        replicas = build.launch(
            f"average_{layer}", reduced, CollectiveKind.ALL_REDUCE, Role.GRADIENT, size_bytes=draw(_SIZES), group="g1"
        )
        reduced = build.wait(f"averaged_{layer}", replicas)
    return build.cast(f"downcast_{layer}", reduced, draw(_SIZES)) if draw(st.booleans()) else reduced


def contentions() -> st.SearchStrategy[Contention]:
    """No contention, or factors as measured and worse."""
    factors = st.sampled_from((1.0, 1.25, 1.5, 2.0, 3.0))
    return st.just(Contention()) | st.builds(Contention, factors, factors, factors)


@st.composite
def priced(
    draw: st.DrawFn, programs: st.SearchStrategy[Program] | None = None, *, cpu: bool = True
) -> tuple[Program, CostTable]:
    """A random program with random prices, contention, wires and copy engines; and CPU time for launches if ``cpu``."""
    program = draw(programs if programs is not None else fsdp_programs())
    on_device = [op.name for op in program.ops if op.kind in (OpKind.COMPUTE, OpKind.LAUNCH)]
    duration_us = {name: draw(_TIMES) for name in on_device}
    launch_us = (
        {name: draw(st.sampled_from((0.0, 1.0, 7.0))) for name in on_device} if cpu and draw(st.booleans()) else {}
    )
    wires = draw(st.sampled_from(({}, {"g0": "inter_node", "g1": "intra_node"})))
    table = prices(program, duration_us, launch_us=launch_us, contention=draw(contentions()))
    own = {op.name: draw(contentions()) for op in program.launches} if draw(st.booleans()) else {}
    engines = {op.name: "copy engine" for op in program.launches if draw(st.booleans())} if draw(st.booleans()) else {}
    between = draw(st.booleans())
    return program, replace(table, wires=wires, beside_compute=own, lanes=engines, starts_between_kernels=between)
