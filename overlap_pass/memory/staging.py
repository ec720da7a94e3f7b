"""Memory that copy engines keep for themselves between the ranks' memories."""

from __future__ import annotations

from overlap_pass.graph.program import CollectiveKind, Program

__all__ = ["LAUNCHES_AT_ONCE", "staging_bytes"]

LAUNCHES_AT_ONCE = 2
"""Staging memory holds the largest launch this many times: one is filled while another is still read."""


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
    return LAUNCHES_AT_ONCE * sum(largest.values())
