"""Memory that copy engines keep for themselves between the ranks' memories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from overlap_pass.graph.program import Collective, CollectiveKind, Program
from overlap_pass.memory.places import aligned

__all__ = [
    "GATHERS_AT_ONCE",
    "REDUCTIONS_AT_ONCE",
    "Channel",
    "at_once",
    "by_copy",
    "capacities_bytes",
    "channel_of",
    "gathers_bytes",
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
    for _, collective in by_copy(program):
        channel = channel_of(collective)
        largest[channel] = max(largest.get(channel, 0), staged_bytes(collective))
    found = {channel: at_once(channel[1]) * size_bytes for channel, size_bytes in largest.items()}
    return {**found, **_leased_bytes(program)}


def staging_bytes(program: Program) -> int:
    """Bytes that this rank keeps for the peers while the graph runs, beside what its ops allocate.

    Where gradients are summed earlier than planned because others need their place (``rewrite.places``), the sum takes the
    place of the gradient, which is no smaller; but for as long as it is being made, both are there: room for one is kept.
    """
    others_bytes = sum(capacities_bytes(program).values()) - gathers_bytes(program)
    return others_bytes + _with_those_before(program) + sum(_largest_sums_bytes(program).values())


def gathers_bytes(program: Program, *, leases: bool = True) -> int:
    """Of that, what the gathers of this graph need; without its leases, what they would need if all were staged."""
    return sum(_gathers(program if leases else replace(program, leases={})).values())


def _gathers(program: Program) -> dict[Channel, int]:
    capacities = capacities_bytes(program)
    return {channel: size for channel, size in capacities.items() if channel[1] is CollectiveKind.ALL_GATHER}


def _with_those_before(program: Program) -> int:
    """Of gathers, with what the graph before goes on sharing: that serves this one, too, if it is large enough."""
    own_bytes = gathers_bytes(program)
    serves = own_bytes <= program.shared_bytes and len(_gathers(program)) == 1  # whose memory it is, is not said
    return program.shared_bytes if serves else own_bytes + program.shared_bytes


def _largest_sums_bytes(program: Program) -> dict[Channel, int]:
    """The largest result that is summed of each channel's pieces."""
    largest: dict[Channel, int] = {}
    for launch, collective in by_copy(program):
        channel = channel_of(collective)
        for wait in map(program.op, program.waits_of[launch]):
            if wait.kernel:
                largest[channel] = max(largest.get(channel, 0), wait.written_bytes)
    return largest


def _leased_bytes(program: Program) -> dict[Channel, int]:
    """Of channels whose launches have leases."""
    found: dict[Channel, int] = {}
    for name, lease in program.leases.items():
        if (collective := program.op(name).collective) is not None:
            found[channel_of(collective)] = lease.capacity_bytes
    return found


def by_copy(program: Program) -> Iterator[tuple[str, Collective]]:
    """Names of the launches by copy, and what they launch."""
    for op in program.launches:
        if op.collective is not None and op.collective.by_copy:
            yield op.name, op.collective
