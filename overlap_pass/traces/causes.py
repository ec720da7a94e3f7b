"""Why communication is exposed and why a device is idle.

Exposed time ends, sooner or later, with a compute kernel. What of it lies behind the begin of that kernel's launch was
spent *blocked* on the collective: the kernel was there and had to wait, so another order can help. What lies before it
is the CPU's: it was *late*, and no order of collectives helps::

    CPU                      │launch of K
    collective   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    compute   ███                          K████
                 └── late ───┘└─ blocked ──┘

An idle stretch ends with the next thing that runs. Before its launch the device's queue was *empty*, and what the
launching thread was at says why; behind it, it was *queued* and had not started.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap_pass.timeline.intervals import Cover, Interval, difference, intersection, union
from overlap_pass.timeline.spans import SpanKind
from overlap_pass.traces.activity import Activities, Sync
from overlap_pass.traces.kernels import DeviceEvent
from overlap_pass.traces.records import Place

__all__ = ["Causes", "ExposedCause", "IdleCause", "SyncWait", "find_causes"]

LAUNCH_LATENCY_NS = 10_000
"""From a launch to the start on an empty device takes less than this."""


class ExposedCause(enum.StrEnum):
    BLOCKED = "blocked"
    LATE = "late"
    UNKNOWN = "unknown"
    """The launch of the next compute kernel, or the kernel itself, is not in the file."""


class IdleCause(enum.StrEnum):
    SYNC = "sync"
    LOADER = "loader"
    ALLOCATOR = "allocator"
    DISPATCH = "dispatch"
    UNTRACED = "untraced"
    LATENCY = "latency"
    QUEUED = "queued"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class SyncWait:
    """Idle time in which the launching thread stood in one synchronising call."""

    sync: Sync
    parts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Causes:
    """Of one device, over the whole file, on its clock.

    Attributes:
        exposed, idle: for each cause the set of times; together the exposed and the idle time.
        syncs: the idle time of ``IdleCause.SYNC`` by call, in order.
    """

    exposed: Mapping[ExposedCause, Sequence[Interval]]
    idle: Mapping[IdleCause, Sequence[Interval]]
    syncs: tuple[SyncWait, ...]


def find_causes(events: Sequence[DeviceEvent], window: Interval, activities: Activities) -> Causes:
    """The causes on one device.

    Args:
        events: what ran on it, sorted by start.
        window: from the begin of the first step, or event, to the end of the last one.
        activities: what the CPU did.
    """
    compute = union(_intervals(events, SpanKind.COMPUTE))
    communication = union(_intervals(events, SpanKind.COMMUNICATION))
    busy = union((event.span.start_ns, event.span.end_ns) for event in events)
    exposed = _exposed(difference(communication, compute), [e for e in events if e.span.kind is SpanKind.COMPUTE])
    idle, empty = _idle(difference([window], busy), events)
    syncs: list[SyncWait] = []
    for place, stretches in empty.items():
        _attribute(union(stretches), place, activities, idle, syncs)
    return Causes(
        {cause: union(exposed[cause]) for cause in ExposedCause},
        {cause: union(idle[cause]) for cause in IdleCause},
        tuple(sorted(syncs, key=lambda wait: wait.sync.start_ns)),
    )


def _intervals(events: Iterable[DeviceEvent], kind: SpanKind) -> Iterable[Interval]:
    return ((event.span.start_ns, event.span.end_ns) for event in events if event.span.kind is kind)


def _exposed(exposed: Iterable[Interval], compute: Sequence[DeviceEvent]) -> defaultdict[ExposedCause, list[Interval]]:
    found: defaultdict[ExposedCause, list[Interval]] = defaultdict(list)
    starts = [event.span.start_ns for event in compute]
    for start, end in exposed:
        position = bisect_left(starts, end)
        launch_ns = compute[position].launch_ns if position < len(compute) else None
        if launch_ns is None:
            found[ExposedCause.UNKNOWN].append((start, end))
            continue
        at = min(max(start, launch_ns), end)
        found[ExposedCause.LATE].append((start, at))
        found[ExposedCause.BLOCKED].append((at, end))
    return found


def _idle(
    idle: Iterable[Interval], events: Sequence[DeviceEvent]
) -> tuple[defaultdict[IdleCause, list[Interval]], Mapping[Place, list[Interval]]]:
    """(what has a cause already, thread → where the queue was empty and that thread filled it next)."""
    found: defaultdict[IdleCause, list[Interval]] = defaultdict(list)
    empty: defaultdict[Place, list[Interval]] = defaultdict(list)
    starts = [event.span.start_ns for event in events]
    for start, end in idle:
        position = bisect_left(starts, end)
        launch = events[position].launch if position < len(events) else None
        if launch is None:
            found[IdleCause.UNKNOWN].append((start, end))
            continue
        at = min(max(start, launch.start_ns), end)
        empty[launch.place].append((start, at))
        late = end - at >= LAUNCH_LATENCY_NS
        found[IdleCause.QUEUED if late else IdleCause.LATENCY].append((at, end))
    return found, empty


def _attribute(
    empty: Sequence[Interval],
    place: Place,
    activities: Activities,
    idle: defaultdict[IdleCause, list[Interval]],
    syncs: list[SyncWait],
) -> None:
    """Give the time in which the queue was empty to what the thread was at; the first that fits takes it."""
    activity = activities.of(place)
    rest = empty
    for cause, times in (
        (IdleCause.SYNC, activity.waiting),
        (IdleCause.LOADER, activity.loading),
        (IdleCause.ALLOCATOR, activity.allocating),
        (IdleCause.DISPATCH, activity.dispatching),
    ):
        taken = intersection(rest, times)
        idle[cause].extend(taken)
        if cause is IdleCause.SYNC and taken:
            syncs.extend(_by_call(taken, activity.syncs))
        rest = difference(rest, taken)
    idle[IdleCause.UNTRACED].extend(rest)


def _by_call(waiting: Sequence[Interval], syncs: Iterable[Sync]) -> Iterable[SyncWait]:
    cover = Cover(waiting)
    starts = [start for start, _ in waiting]
    for sync in syncs:
        if cover.within_ns(sync.start_ns, sync.end_ns):
            near = waiting[max(0, bisect_left(starts, sync.start_ns) - 1) : bisect_left(starts, sync.end_ns)]
            yield SyncWait(sync, tuple(intersection(near, [(sync.start_ns, sync.end_ns)])))
