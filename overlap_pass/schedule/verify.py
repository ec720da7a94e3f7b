"""Is this order legal? An own reading of the program, independent of the dependency graph and of every strategy.

The order is replayed step by step against the state that each op needs:

* every op exactly once, inputs in their order, the output last;
* every value read exists, and a collective's result is read behind its wait only;
* reads and writes of one storage stand on the same side of each other as written (views and aliases included; a
  running collective reads its input and writes its output until its wait);
* random draws and opaque ops keep their order, and nothing that communicates, draws or writes crosses an opaque op;
* activation collectives keep their order over all groups unless the program lets them loose, and so do all launches where
  the program says so; every launch keeps its waits;
* no more communicators are in flight than the program allows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from overlap_pass.graph.program import OpKind, OpNode, Program, Role

__all__ = ["violations"]

_SHOWN = 5


def violations(program: Program, order: tuple[str, ...]) -> tuple[str, ...]:
    """What is wrong with ``order``; empty if it is legal. Each entry is a sentence that names the ops."""
    found = _permutation(program, order)
    if found:
        return tuple(found)
    at = {name: step for step, name in enumerate(order)}
    found += _unwaited(program)
    found += _data(program, at)
    found += _sequence("inputs", (op for op in program.ops if op.kind is OpKind.INPUT), at)
    found += _sequence("random draws", (op for op in program.ops if op.random), at)
    if not program.activations_free:
        found += _sequence("activation collectives", (op for op in program.launches if _activation(op)), at)
    if program.launches_fixed:
        found += _sequence("launches in the order of all ranks", program.launches, at)
    found += _fences(program, at)
    found += _storages(program, at)
    found += _in_flight(program, order)
    return tuple(found)


def _activation(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is Role.ACTIVATION


def _permutation(program: Program, order: tuple[str, ...]) -> list[str]:
    present = set(order)
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


def _data(program: Program, at: dict[str, int]) -> list[str]:
    found = []
    for op in program.ops:
        for name in op.inputs:
            if at[name] > at[op.name]:
                found.append(f"{op.name} reads {name} before it exists")
        if op.kind is OpKind.WAIT and op.launch is not None and at[op.launch] > at[op.name]:
            found.append(f"{op.name} waits for {op.launch} before it is launched")
        if op.kind is OpKind.OUTPUT and at[op.name] != len(program.ops) - 1:
            found.append(f"{op.name} is not the last op")
    return found


def _sequence(what: str, ops: Iterable[OpNode], at: dict[str, int]) -> list[str]:
    names = [op.name for op in ops]
    return [
        f"{what} change places: {second} before {first}"
        for first, second in itertools.pairwise(names)
        if at[first] > at[second]
    ]


def _fences(program: Program, at: dict[str, int]) -> list[str]:
    """Positions, among everything bound, of each opaque op must not change, nor who stands on which side of it."""
    bound = [op for op in program.ops if _bound(op)]
    fences = [op for op in bound if op.opaque]
    if not fences:
        return []
    found = []
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


def _storages(program: Program, at: dict[str, int]) -> list[str]:
    """Compare, per written storage, every (writer, other) pair's side before and after."""
    written = {storage for op in program.ops for storage in op.writes}
    if not written:
        return []
    touching: dict[int, list[OpNode]] = {storage: [] for storage in written}
    for op in program.ops:
        for storage in _uses(program, op) & written:
            touching[storage].append(op)
    found = []
    for storage, ops in sorted(touching.items()):
        for writer in (op for op in ops if storage in op.writes):
            for other in ops:
                if other is writer or other.kind is OpKind.INPUT:
                    continue
                if _earlier(program, other, writer) != (at[other.name] < at[writer.name]):
                    found.append(f"{other.name} and the write of {writer.name} to the same memory change places")
    return found


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
