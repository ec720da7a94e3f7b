"""The same step on another number of ranks: groups grow or shrink, what a rank computes stays.

Full tensors keep their size, so payloads of gathers and reductions stay; shards take ``old / new`` of what they took:
the inputs that lead to a parameter gather, and what comes out of a gradient reduction, with the casts and copies on the
way. To change the GPU or the link, price the program with another hardware file.

        input ─ cast ─▶ gather ─▶ full ─▶ …          … ─▶ full ─▶ reduce ─▶ cast ─▶ output
        └── shard side ──┘                                         └── shard side ───┘
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import Collective, CollectiveKind, OpKind, OpNode, Program, Role

__all__ = ["rescale"]

_WHOLE = Fraction(1)


def rescale(program: Program, group_sizes: Mapping[str, int]) -> Program:
    """The program with some groups of another size; those not named stay.

    An all-reduce over the replicas of a hybrid-sharded mesh sends a shard, so its payload follows the group that
    sharded. Sizes are rounded up to whole bytes.

    Raises:
        OptionError: a group that the program lacks, a size below 1, or a group with activation collectives, whose size
            decides what each rank computes.
    """
    for group, size in group_sizes.items():
        _check(program, group, size)
    ratio = {group: Fraction(old, group_sizes.get(group, old)) for group, old in program.groups.items()}
    shares = _shares(program, ratio)
    return replace(
        program,
        ops=tuple(_resized(op, shares, group_sizes) for op in program.ops),
        storages=tuple(replace(s, size_bytes=_scaled(s.size_bytes, shares[s.owner])) for s in program.storages),
        groups={**program.groups, **group_sizes},
    )


def _check(program: Program, group: str, size: int) -> None:
    if group not in program.groups:
        known = ", ".join(program.groups) or "none"
        raise OptionError(f"group {group!r} is not in program {program.name!r}; its groups: {known}")
    if size < 1:
        raise OptionError(f"group {group!r} cannot have {size} ranks: it must be at least 1")
    for op in program.launches:
        if op.collective is not None and op.collective.group == group and op.collective.role is Role.ACTIVATION:
            raise OptionError(
                f"group {group!r} carries the activation collective {op.name!r}: with {size} ranks each of them computes "
                "something else; trace the model at that size"
            )


def _shares(program: Program, ratio: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Op → size of its result as a share of what it was."""
    shares = dict.fromkeys(program.order, _WHOLE)
    for op, readers in zip(reversed(program.ops), reversed(program.readers), strict=True):
        if op.kind is OpKind.INPUT or op.moves_data:
            wanted = {
                _wanted(program.ops[r], shares, ratio) for r in readers if program.ops[r].kind is not OpKind.OUTPUT
            }
            shares[op.name] = wanted.pop() if len(wanted) == 1 else _WHOLE
    for op in program.ops:
        sources = {shares[name] for name in op.inputs}
        if len(sources) != 1:
            continue
        if op.collective is not None:
            shares[op.name] = _share_of_result(op.collective, sources.pop(), ratio)
        elif op.kind is OpKind.WAIT or op.moves_data:
            shares[op.name] = sources.pop()
    return shares


def _wanted(reader: OpNode, shares: Mapping[str, Fraction], ratio: Mapping[str, Fraction]) -> Fraction:
    """Share of its input that a reader takes: a gather takes a shard, what moves data the share that is wanted of it."""
    if reader.collective is not None:
        return ratio[reader.collective.group] if reader.collective.role is Role.PARAMETER else _WHOLE
    return shares[reader.name] if reader.moves_data else _WHOLE


def _share_of_result(collective: Collective, source: Fraction, ratio: Mapping[str, Fraction]) -> Fraction:
    if collective.kind is CollectiveKind.ALL_GATHER:
        return source / ratio[collective.group]
    if collective.kind is CollectiveKind.REDUCE_SCATTER:
        return source * ratio[collective.group]
    return source


def _resized(op: OpNode, shares: Mapping[str, Fraction], group_sizes: Mapping[str, int]) -> OpNode:
    sources = {shares[name] for name in op.inputs}
    source = sources.pop() if len(sources) == 1 else _WHOLE
    collective = op.collective
    if collective is not None:
        full = shares[op.name] if collective.kind is CollectiveKind.ALL_GATHER else source
        collective = replace(
            collective,
            group_size=group_sizes.get(collective.group, collective.group_size),
            payload_bytes=_scaled(collective.payload_bytes, full),
        )
    return replace(
        op,
        read_bytes=_scaled(op.read_bytes, source),
        written_bytes=_scaled(op.written_bytes, shares[op.name]),
        collective=collective,
    )


def _scaled(size_bytes: int, share: Fraction) -> int:
    return math.ceil(size_bytes * share)
