"""Memory that copy engines keep for themselves between the ranks' memories."""

from __future__ import annotations

from collections.abc import Iterator

from overlap_pass.graph.program import Collective, CollectiveKind, Program
from overlap_pass.memory.places import aligned

__all__ = [
    "GATHERS_AT_ONCE",
    "REDUCTIONS_AT_ONCE",
    "Channel",
    "at_once",
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


def at_once(kind: CollectiveKind) -> int:
    """How many of the largest launch of a channel its staging memory holds."""
    return GATHERS_AT_ONCE if kind is CollectiveKind.ALL_GATHER else REDUCTIONS_AT_ONCE


def capacities_bytes(program: Program) -> dict[Channel, int]:
    """Bytes of staging memory of each channel while the graph runs."""
    largest: dict[Channel, int] = {}
    for _, collective in _by_copy(program):
        channel = channel_of(collective)
        largest[channel] = max(largest.get(channel, 0), staged_bytes(collective))
    return {channel: at_once(channel[1]) * size_bytes for channel, size_bytes in largest.items()}


def staging_bytes(program: Program) -> int:
    """Bytes that this rank keeps for the peers while the graph runs, beside what its ops allocate.

    Where gradients are summed earlier than planned because others need their place (``rewrite.places``), the sum takes the
    place of the gradient, which is no smaller; but for as long as it is being made, both are there: room for one is kept.
    """
    return sum(capacities_bytes(program).values()) + sum(_largest_sums_bytes(program).values())


def _largest_sums_bytes(program: Program) -> dict[Channel, int]:
    """The largest result that is summed of each channel's pieces."""
    largest: dict[Channel, int] = {}
    for launch, collective in _by_copy(program):
        channel = channel_of(collective)
        for wait in map(program.op, program.waits_of[launch]):
            if wait.kernel:
                largest[channel] = max(largest.get(channel, 0), wait.written_bytes)
    return largest


def _by_copy(program: Program) -> Iterator[tuple[str, Collective]]:
    """Names of the launches by copy, and what they launch."""
    for op in program.launches:
        if op.collective is not None and op.collective.by_copy:
            yield op.name, op.collective
