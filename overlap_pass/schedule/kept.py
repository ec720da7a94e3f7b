"""Forward and backward of a step with some gathered parameters kept from the one to the other.

    gathered again   forward  ag ─ w ─ mm            backward  ag ─ w ─ mm
    kept             forward  ag ─ w ─ mm ─▶ w       backward       w ─ mm

That is what the partitioner makes of the tags, told from the programs alone: so that it can be planned before it is done.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from overlap_pass.graph.program import OpKind, OpNode, Program, Role, Storage

__all__ = ["Gathered", "gathered_twice", "keep_in_backward", "keep_in_forward"]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A parameter that forward and backward both gather.

    Attributes:
        launch, wait: their names, the same in both programs.
        size_bytes: what keeping it holds.
        used_at: position of the wait in the backward as written.
    """

    launch: str
    wait: str
    size_bytes: int
    used_at: int


def gathered_twice(forward: Program, backward: Program) -> tuple[Gathered, ...]:
    """In the order in which the backward needs them."""
    found = []
    for op in backward.launches:
        if op.collective is None or op.collective.role is not Role.PARAMETER:
            continue
        waits = backward.waits_of[op.name]
        if len(waits) == 1 and op.name in forward.index and forward.waits_of.get(op.name) == waits:
            found.append(Gathered(op.name, waits[0], op.written_bytes, backward.index[waits[0]]))
    return tuple(sorted(found, key=lambda gather: gather.used_at))


def keep_in_forward(forward: Program, kept: Collection[Gathered]) -> Program:
    """The forward hands the kept parameters out: they live to its end."""
    output = forward.ops[-1]
    waits = tuple(gather.wait for gather in kept if gather.wait not in output.inputs)
    return replace(forward, ops=(*forward.ops[:-1], replace(output, inputs=(*output.inputs, *waits))))


def keep_in_backward(backward: Program, kept: Collection[Gathered]) -> Program:
    """The backward gets the kept parameters as inputs, which die after their last reader; what led to them is gone."""
    if not kept:
        return backward
    waits = {gather.wait for gather in kept}
    owners = {gather.launch: gather.wait for gather in kept}
    dead = _dead(backward, {gather.launch for gather in kept}, waits)
    storages, number = _renumbered(backward, dead, owners)
    given, rest = [], []
    for op in backward.ops:
        if op.name in waits:
            given.append(OpNode(op.name, OpKind.INPUT, "input", storages=_ids(op.storages, number), dtype=op.dtype))
        elif op.name not in dead:
            rest.append(replace(op, storages=_ids(op.storages, number), writes=_ids(op.writes, number)))
    return replace(backward, ops=(*given, *rest), storages=storages)


def _dead(program: Program, launches: set[str], waits: set[str]) -> set[str]:
    """The launches, and what led to nothing else."""
    dead = set(launches)
    for position in range(len(program.ops) - 1, -1, -1):
        op, readers = program.ops[position], [program.ops[reader].name for reader in program.readers[position]]
        pure = op.kind is OpKind.INPUT or (op.moves_data and not (op.random or op.opaque or op.writes))
        if pure and readers and all(reader in dead or reader in waits for reader in readers):
            dead.add(op.name)
    return dead


def _renumbered(program: Program, dead: set[str], owners: dict[str, str]) -> tuple[tuple[Storage, ...], dict[int, int]]:
    left = [storage for storage in program.storages if storage.owner in owners or storage.owner not in dead]
    number = {storage.id: new for new, storage in enumerate(left)}
    storages = (replace(s, id=number[s.id], owner=owners.get(s.owner, s.owner)) for s in left)
    return tuple(storages), number


def _ids(storages: tuple[int, ...], number: dict[int, int]) -> tuple[int, ...]:
    return tuple(number[storage] for storage in storages)
