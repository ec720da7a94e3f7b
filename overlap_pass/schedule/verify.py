"""Is this order legal? An own reading of the program, independent of the dependency graph and of every strategy.

The order is replayed step by step against the state that each op needs:

* every op exactly once, inputs in their order, the output last;
* every value read exists, and a collective's result is read behind its wait only;
* reads and writes of one storage stand on the same side of each other as written (views and aliases included; a
  running collective reads its input and writes its output until its wait);
* random draws and opaque ops keep their order, and nothing that communicates, draws or writes crosses an opaque op;
* activation collectives keep their order over all groups unless the program lets them loose, and so do all launches where
  the program says so; every launch keeps its waits;
* what is put into shared memory stands behind all that reads what lay there before, and nothing that lies there leaves the
  graph;
* no more communicators are in flight than the program allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from overlap_pass.graph.once import once
from overlap_pass.graph.program import OpKind, OpNode, Program, Role

__all__ = ["violations"]

_SHOWN = 5


def violations(program: Program, order: tuple[str, ...]) -> tuple[str, ...]:
    """What is wrong with ``order``; empty if it is legal. Each entry is a sentence that names the ops."""
    found = _permutation(program, order)
    if found:
        return tuple(found)
    promises = once(program, _Promises)
    found += promises.unwaited
    found += promises.broken(order)
    found += [f"{name} is not the last op" for name in promises.outputs if order[-1] != name]
    found += _fences(program, order)
    found += _in_flight(program, order)
    return tuple(found)


class _Promises:
    """What a program asks of every order of its ops as to which of two comes first: read off it once, for all orders.

    Attributes:
        unwaited: see :func:`_unwaited`; true of every order.
        outputs: which must come last.
    """

    def __init__(self, program: Program) -> None:
        self._index = program.index
        self._pairs = [*_data(program), *_sequences(program), *_storages(program), *_places(program)]
        self._first, self._second = (
            np.array([program.index[pair[side]] for pair in self._pairs], dtype=np.int64) for side in (0, 1)
        )
        self.unwaited = tuple(_unwaited(program))
        self.outputs = tuple(op.name for op in program.ops if op.kind is OpKind.OUTPUT)

    def broken(self, order: tuple[str, ...]) -> list[str]:
        """Sentences for the pairs that stand the wrong way round."""
        steps = np.empty(len(order), dtype=np.int64)
        steps[[self._index[name] for name in order]] = np.arange(len(order))
        wrong = np.flatnonzero(steps[self._first] > steps[self._second])
        return [self._pairs[number][2].format(*self._pairs[number][:2]) for number in wrong.tolist()]


_Pair = tuple[str, str, str]
"""An op, one that must not come before it, and what is wrong if it does, with their names as ``{0}`` and ``{1}``."""


def _activation(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is Role.ACTIVATION


def _permutation(program: Program, order: tuple[str, ...]) -> list[str]:
    present = set(order)
    if len(order) == len(present) and program.index.keys() == present:
        return []
    missing = [name for name in program.order if name not in present]
    if missing:
        return [f"ops lost: {', '.join(missing[:_SHOWN])}"]
    if len(order) != len(program.ops):
        return [f"{len(order)} ops in the order, {len(program.ops)} in the program: some stand twice or are foreign"]
    return []


def _unwaited(program: Program) -> list[str]:
    """Ops other than waits that read what a launch returns, or a part of it: it may not be there yet, or leave the graph so."""
    running = {op.name for op in program.launches}
    found = []
    for op in program.ops:
        read = running.intersection(op.inputs)
        if read and op.kind is OpKind.VIEW and op.target == "getitem":
            running.add(op.name)
        elif read and op.kind is not OpKind.WAIT:
            found.append(f"{op.name} reads {', '.join(sorted(read))} without a wait")
    return found


def _data(program: Program) -> Iterator[_Pair]:
    for op in program.ops:
        for name in op.inputs:
            yield name, op.name, "{1} reads {0} before it exists"
        if op.kind is OpKind.WAIT and op.launch is not None:
            yield op.launch, op.name, "{1} waits for {0} before it is launched"


def _sequences(program: Program) -> Iterator[_Pair]:
    yield from _sequence("inputs", (op for op in program.ops if op.kind is OpKind.INPUT))
    yield from _sequence("random draws", (op for op in program.ops if op.random))
    if not program.activations_free:
        yield from _sequence("activation collectives", (op for op in program.launches if _activation(op)))
    if program.launches_fixed:
        yield from _sequence("launches in the order of all ranks", program.launches)


def _sequence(what: str, ops: Iterable[OpNode]) -> Iterator[_Pair]:
    for first, second in itertools.pairwise(ops):
        yield first.name, second.name, f"{what} change places: {{1}} before {{0}}"


def _fences(program: Program, order: tuple[str, ...]) -> list[str]:
    """Positions, among everything bound, of each opaque op must not change, nor who stands on which side of it."""
    fences = [op for op in program.ops if op.opaque]
    if not fences:
        return []
    bound = [op for op in program.ops if _bound(op)]
    at, found = {name: step for step, name in enumerate(order)}, []
    fence_of = {op.name: sum(f is not op and _earlier(program, f, op) for f in fences) for op in bound}
    for op in bound:
        now = sum(f is not op and at[f.name] < at[op.name] for f in fences)
        if now != fence_of[op.name]:
            found.append(f"{op.name} crosses an opaque op ({fence_of[op.name]} before it as written, now {now})")
    return found


def _earlier(program: Program, first: OpNode, second: OpNode) -> bool:
    return program.index[first.name] < program.index[second.name]


def _bound(op: OpNode) -> bool:
    return op.opaque or op.random or bool(op.writes) or op.kind in (OpKind.LAUNCH, OpKind.WAIT)


def _storages(program: Program) -> Iterator[_Pair]:
    """Of all that touches a written storage: the write before it, and before a write all that came since the one before.

    Through the writes between them, that holds every write and everything else on their sides of each other.
    """
    written = {storage for op in program.ops for storage in op.writes}
    if not written:
        return
    since: dict[int, list[str]] = {storage: [] for storage in written}  # the last write, and what came behind it
    named = {op.name for op in program.ops if not written.isdisjoint(op.storages)}
    for op in program.ops:
        near = op.writes or op.name in named or op.kind is OpKind.WAIT or not named.isdisjoint(op.inputs)
        if not near or op.kind is OpKind.INPUT:
            continue
        for storage in sorted(_uses(program, op) & written):
            before = since[storage]
            if storage in op.writes:
                for name in before:
                    yield name, op.name, "{0} and the write of {1} to the same memory change places"
                since[storage] = [op.name]
            else:
                if before and storage in program.op(before[0]).writes:
                    yield before[0], op.name, "{1} and the write of {0} to the same memory change places"
                before.append(op.name)


def _places(program: Program) -> Iterator[_Pair]:
    """All that reads a result in shared memory, and the first launch behind its own that takes bytes of its place."""
    leased = [op for op in program.launches if op.name in program.leases]
    touching: dict[int, list[str]] = {}
    for op in program.ops:
        if op.kind in (OpKind.COMPUTE, OpKind.OUTPUT):
            for storage in _uses(program, op):
                touching.setdefault(storage, []).append(op.name)
    for number, op in enumerate(leased):
        lease = program.leases[op.name]
        taker = next((one for one in leased[number + 1 :] if _share_bytes(program, op, one)), None)
        for storage in itertools.compress(program.results(op), lease.final):
            for name in touching.get(storage, ()):
                if program.op(name).kind is OpKind.OUTPUT:
                    yield name, op.name, "{0} hands out what {1} puts into shared memory"
                elif taker is not None:
                    yield name, taker.name, "{1} takes the place of what {0} reads"


def _share_bytes(program: Program, one: OpNode, other: OpNode) -> bool:
    same = one.collective and other.collective and one.collective.group == other.collective.group
    return bool(same) and program.leases[one.name].meets(program.leases[other.name])


def _uses(program: Program, op: OpNode) -> set[int]:
    """Storages that an op names, reads or writes; a wait stands for the end of its collective's reads and writes."""
    used = set(op.storages) | set(op.writes)
    sources = list(op.inputs)
    if op.kind is OpKind.WAIT and op.launch is not None:
        sources += program.op(op.launch).inputs
        used |= set(program.op(op.launch).writes)
    for name in sources:
        used |= set(program.op(name).storages)
    return used


def _in_flight(program: Program, order: tuple[str, ...]) -> list[str]:
    """Launches at which more communicators run than may; one runs until every wait of its launches has been."""
    if program.most_in_flight is None:
        return []
    found = []
    waits_left = {name: len(waits) for name, waits in program.waits_of.items()}
    running: dict[str, set[str]] = {}
    for op in map(program.op, order):
        if op.collective is not None:
            running.setdefault(op.collective.group, set()).add(op.name)
            groups = sorted(group for group, launches in running.items() if launches)
            if len(groups) > program.most_in_flight:
                found.append(
                    f"{op.name} puts {', '.join(groups)} in flight at once, more than {program.most_in_flight}"
                )
        elif op.launch is not None:
            waits_left[op.launch] -= 1
            if not waits_left[op.launch]:
                for launches in running.values():
                    launches.discard(op.launch)
    return found
