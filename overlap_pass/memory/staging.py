"""Memory that copy engines keep for themselves between the ranks' memories."""

from __future__ import annotations

from overlap_pass.graph.program import Collective, CollectiveKind, Program
from overlap_pass.memory.places import aligned

__all__ = [
    "GATHERS_AT_ONCE",
    "REDUCTIONS_AT_ONCE",
    "Channel",
    "capacities_bytes",
    "channel_of",
    "staged_bytes",
    "staging_bytes",
]

GATHERS_AT_ONCE = 3
"""Staging memory holds the largest gather this many times: one is filled while others are still read."""

REDUCTIONS_AT_ONCE = 4
"""The same for reductions, whose gradients lie there until they are summed: the compute stream does that when it comes by."""

Channel = tuple[str, CollectiveKind]
"""Launches that share staging memory: those of one group and kind."""


def channel_of(collective: Collective) -> Channel:
    return collective.group, collective.kind


def staged_bytes(collective: Collective) -> int:
    """What lies in this rank's staging memory: its own part of a gather, the parts of all others of a reduction."""
    part_bytes = collective.payload_bytes // collective.group_size
    gathers = collective.kind is CollectiveKind.ALL_GATHER
    return aligned(part_bytes if gathers else part_bytes * (collective.group_size - 1))


def capacities_bytes(program: Program) -> dict[Channel, int]:
    """Bytes of staging memory of each channel while the graph runs."""
    largest: dict[Channel, int] = {}
    for op in program.launches:
        collective = op.collective
        if collective is not None and collective.by_copy:
            channel = channel_of(collective)
            largest[channel] = max(largest.get(channel, 0), staged_bytes(collective))
    return {
        channel: (GATHERS_AT_ONCE if channel[1] is CollectiveKind.ALL_GATHER else REDUCTIONS_AT_ONCE) * size_bytes
        for channel, size_bytes in largest.items()
    }


def staging_bytes(program: Program) -> int:
    """Bytes that this rank keeps for the peers while the graph runs, beside what its ops allocate.

    Where gradients are summed earlier than planned because others need their place (``rewrite.places``), the sum takes the
    place of the gradient, which is no smaller; but for as long as it is being made, both are there: room for one is kept.
    """
    return sum(capacities_bytes(program).values()) + sum(_largest_sums_bytes(program).values())


def _largest_sums_bytes(program: Program) -> dict[Channel, int]:
    """The largest result that is summed of each channel's pieces."""
    largest: dict[Channel, int] = {}
    for op in program.ops:
        collective = None if op.launch is None or not op.kernel else program.op(op.launch).collective
        if collective is not None and collective.by_copy:
            channel = channel_of(collective)
            largest[channel] = max(largest.get(channel, 0), op.written_bytes)
    return largest
