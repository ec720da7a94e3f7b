"""Launching neighbouring collectives of one FSDP unit as one: fewer starts, no copies.

A coalesced launch hands several tensors to the communicator at once (NCCL's group call): every tensor still goes from
its own memory to its own memory, so nothing is copied into or out of a bucket, but only one kernel has to find its
place on the device, one latency is paid and one launch costs the CPU. Numbers do not change: each tensor is reduced by
itself.

    launch a ─ wait a ─ reader a              ┌ part a ─ wait a ─ reader a
    launch b ─ wait b ─ reader b   ⇒  launch ─┤
                                              └ part b ─ wait b ─ reader b
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from overlap_pass.graph.program import CollectiveKind, OpKind, OpNode, Program, Role, Storage
from overlap_pass.schedule.placement import Move, Placement

__all__ = ["Group", "apart", "coalesce", "groups_of", "unjoinable"]

_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True)
class Group:
    """Launches that become one.

    Attributes:
        members: names of the launches, at least two, in the order in which their results are needed (gathers) or
            their inputs exist (reductions).
    """

    members: tuple[str, ...]

    @property
    def launch(self) -> str:
        """Name of the coalesced launch."""
        return f"{self.members[0]}_coalesced"

    def part(self, member: str) -> str:
        """Name of the op that picks a member's result out of the coalesced one."""
        return f"{member}_part"


def groups_of(program: Program, target_bytes: int, *, across: bool = False) -> tuple[Group, ...]:
    """Neighbours of one unit, kind, communicator and dtype, packed until a launch carries ``target_bytes``.

    Packing order is the order of need (gathers) and of release (reductions): what is needed first is in the first
    launch. What stays alone is in no group. Gathers of activations are left alone, and so are collectives without a unit.
    Nothing is joined across an opaque op.

    Args:
        across: neighbours of any units, and of none.
    """
    open_runs: dict[tuple[object, ...], list[str]] = {}
    filled: dict[tuple[object, ...], int] = {}
    found: list[Group] = []
    fences = list(itertools.accumulate(op.opaque for op in program.ops))
    moves = [move for move in Placement.of_program(program).moves if _may_join(program, move, across=across)]
    for move in sorted(moves, key=lambda move: (move.deadline, move.release, move.launch)):
        op = program.ops[move.launch]
        if op.collective is None:
            continue
        unit = None if across else op.collective.unit
        key = (op.collective.kind, op.collective.group, op.collective.dtype, unit, fences[move.launch])
        run = open_runs.setdefault(key, [])
        run.append(op.name)
        filled[key] = filled.get(key, 0) + op.collective.payload_bytes
        if filled[key] >= target_bytes:
            found.append(Group(tuple(run)))
            open_runs[key], filled[key] = [], 0
    found += [Group(tuple(run)) for run in open_runs.values()]
    return tuple(group for group in found if len(group.members) > 1)


def _may_join(program: Program, move: Move, *, across: bool) -> bool:
    op = program.ops[move.launch]
    collective = op.collective
    return (
        collective is not None
        and collective.kind in _KINDS
        and collective.role is not Role.ACTIVATION
        and (across or collective.unit is not None)
        and len(op.inputs) == 1
        and len(move.waits) == 1
        and not op.writes
        and not move.after
    )


def unjoinable(program: Program, groups: Sequence[Group]) -> str:
    """Why groups that somebody else made cannot be joined; "" if they can."""
    moves = {program.ops[move.launch].name: move for move in Placement.of_program(program).moves}
    seen: set[str] = set()
    for group in groups:
        for name in group.members:
            if name in seen or name not in moves or not _may_join(program, moves[name], across=True):
                return f"{name} cannot be joined with others"
            seen.add(name)
        collectives = [program.op(name).collective for name in group.members]
        if len({(c.kind, c.group, c.dtype) for c in collectives if c is not None}) != 1 or len(collectives) < 2:
            return f"{', '.join(group.members)} are not several of one kind, communicator and dtype"
    return ""


def coalesce(program: Program, groups: Sequence[Group]) -> Program:
    """The program with each group launched at once, in a legal order close to the one as written.

    A coalesced gather stands where its first member stood, with the casts of all members before it; a coalesced
    reduction where its last member stood.
    """
    if not groups:
        return program
    keys = {op.name: float(position) for position, op in enumerate(program.ops)}
    heads = {program.ops[move.launch].name: move.head for move in Placement.of_program(program).moves}
    replaced: dict[str, Group] = {member: group for group in groups for member in group.members}
    ops: list[OpNode] = []
    for op in program.ops:
        group = replaced.get(op.name)
        if group is not None:
            ops.append(
                OpNode(group.part(op.name), OpKind.VIEW, "getitem", (group.launch,), op.storages, dtype=op.dtype)
            )
        elif op.launch in replaced:
            group = replaced[op.launch]
            inputs = tuple(group.part(name) if name in replaced else name for name in op.inputs)
            ops.append(replace(op, inputs=inputs, launch=group.launch))
        else:
            ops.append(op)
    for group in groups:
        members = [program.op(member) for member in group.members]
        gathers = members[0].collective is not None and members[0].collective.role is Role.PARAMETER
        place = min if gathers else max
        at = place(keys[member.name] for member in members)
        for member in members:
            keys[group.part(member.name)] = max(at, keys[member.name])
            for position in heads[member.name] if gathers else ():
                keys[program.ops[position].name] = min(at, keys[program.ops[position].name])
        keys[group.launch] = at
        ops.append(_joined(group, members))
    owners = {member: group.launch for member, group in replaced.items()}
    storages = tuple(
        Storage(s.id, s.size_bytes, owners[s.owner], s.held) if s.owner in owners else s for s in program.storages
    )
    return replace(program, ops=_sorted(ops, keys), storages=storages)


def apart(order: Sequence[str], groups: Sequence[Group]) -> tuple[str, ...]:
    """An order of a program with joined launches as an order of the program as it came, each group in a row."""
    members = {group.launch: group.members for group in groups}
    parts = {group.part(member) for group in groups for member in group.members}
    return tuple(one for name in order if name not in parts for one in members.get(name, (name,)))


def _joined(group: Group, members: Sequence[OpNode]) -> OpNode:
    collectives = [member.collective for member in members if member.collective is not None]
    names = [collective.parameter for collective in collectives if collective.parameter]
    return replace(
        members[0],
        name=group.launch,
        target=f"{members[0].target} coalesced",
        inputs=tuple(name for member in members for name in member.inputs),
        storages=tuple(storage for member in members for storage in member.storages),
        read_bytes=sum(member.read_bytes for member in members),
        written_bytes=sum(member.written_bytes for member in members),
        collective=replace(
            collectives[0],
            payload_bytes=sum(collective.payload_bytes for collective in collectives),
            parameter=f"{names[0]} and {len(names) - 1} more" if names else None,
        ),
    )


def _sorted(ops: Sequence[OpNode], keys: dict[str, float]) -> tuple[OpNode, ...]:
    """Topological order, by key among what is ready. The output reads everything and stays last."""
    by_name = {op.name: op for op in ops}
    missing = {op.name: len(op.inputs) for op in ops}
    readers: dict[str, list[str]] = {op.name: [] for op in ops}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op.name)
    ready = [(keys[name], name) for name, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order: list[OpNode] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(by_name[name])
        for reader in readers[name]:
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (keys[reader], reader))
    output = [op for op in order if op.kind is OpKind.OUTPUT]
    return tuple(op for op in order if op.kind is not OpKind.OUTPUT) + tuple(output)
