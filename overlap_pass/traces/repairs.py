"""Device events whose time cannot be true, made true where that is possible, and counted.

Profilers have written kernels that last for years, or far into the next kernel of their stream. A small overlap on one
stream is legal (a kernel may start before its predecessor has ended), and the kernels of one CUDA graph may carry one
stream's number though they ran on several: neither is touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from overlap_pass.traces.records import Event

__all__ = ["Repairs", "repair"]

LARGE_OVERHANG_NS = 1_000_000
"""What an event may reach into the next of its stream."""

IMPOSSIBLE_NS = 1_000_000_000
IMPOSSIBLE_FACTOR = 10
"""An event is impossible if it is longer than :data:`IMPOSSIBLE_NS` and this many times all that lies between the first
and the last start in the file."""


@dataclass(frozen=True, slots=True)
class Repairs:
    """What was mended or left out.

    Attributes:
        empty: device events without a duration; they count for nothing.
        clipped: events that reached far into the next of their stream and were cut there.
        capped: events of an impossible length, cut at the last start in the file.
        clipped_ns: time that this took away, in all.
    """

    empty: int = 0
    clipped: int = 0
    capped: int = 0
    clipped_ns: int = 0


def repair(events: Sequence[Event]) -> tuple[list[Event], Repairs]:
    """Events that took time, in the given order, the impossible among them shortened."""
    real = [event for event in events if event.start_ns < event.end_ns]
    if not real:
        return [], Repairs(empty=len(events))
    first_ns = min(event.start_ns for event in real)
    last_ns = max(event.start_ns for event in real)
    longest_ns = max(IMPOSSIBLE_NS, IMPOSSIBLE_FACTOR * (last_ns - first_ns))
    follower_ns = _starts_of_followers(real)
    mended: list[Event] = []
    clipped = capped = lost_ns = 0
    for event, next_ns in zip(real, follower_ns, strict=True):
        end_ns = event.end_ns
        if next_ns is not None and end_ns - next_ns > LARGE_OVERHANG_NS:
            end_ns = next_ns
            clipped += 1
        elif end_ns - event.start_ns > longest_ns:
            end_ns = max(last_ns, event.start_ns + 1)
            capped += 1
        lost_ns += event.end_ns - end_ns
        mended.append(event if end_ns == event.end_ns else event._replace(end_ns=end_ns))
    return mended, Repairs(len(events) - len(real), clipped, capped, lost_ns)


def _starts_of_followers(events: Sequence[Event]) -> list[int | None]:
    """When the next event begins on the stream of each, ``None`` where that says nothing about it."""
    streams: dict[tuple[object, object], list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        streams[event.pid, event.tid].append(position)
    found: list[int | None] = [None] * len(events)
    for positions in streams.values():
        ordered = sorted(positions, key=lambda i: (events[i].start_ns, i))
        for i, follower in _pairs(events, ordered):
            found[i] = follower
    return found


def _pairs(events: Sequence[Event], ordered: Sequence[int]) -> Iterable[tuple[int, int]]:
    for i, j in pairwise(ordered):
        graph = events[i].correlation
        if events[i].start_ns < events[j].start_ns and not (graph and graph == events[j].correlation):
            yield i, events[j].start_ns
