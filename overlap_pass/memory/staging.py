"""Memory that copy engines keep for themselves between the ranks' memories."""

from __future__ import annotations

from overlap_pass.graph.program import CollectiveKind, Program

__all__ = ["GATHERS_AT_ONCE", "REDUCTIONS_AT_ONCE", "staging_bytes"]

GATHERS_AT_ONCE = 3
"""Staging memory holds the largest gather this many times: one is filled while others are still read."""

REDUCTIONS_AT_ONCE = 4
"""The same for reductions, whose gradients lie there until they are summed: the compute stream does that when it comes by."""


def staging_bytes(program: Program) -> int:
    """Bytes that this rank keeps for the peers while the graph runs, beside what its ops allocate.

    A gather stages this rank's part of the result, a reduction receives the parts of all other ranks.
    """
    largest: dict[tuple[str, CollectiveKind], int] = {}
    for op in program.launches:
        collective = op.collective
        if collective is None or not collective.by_copy:
            continue
        part_bytes = collective.payload_bytes // collective.group_size
        gathers = collective.kind is CollectiveKind.ALL_GATHER
        staged_bytes = part_bytes if gathers else part_bytes * (collective.group_size - 1)
        channel = (collective.group, collective.kind)
        largest[channel] = max(largest.get(channel, 0), staged_bytes)
    return sum(
        (GATHERS_AT_ONCE if kind is CollectiveKind.ALL_GATHER else REDUCTIONS_AT_ONCE) * size_bytes
        for (_, kind), size_bytes in largest.items()
    )
