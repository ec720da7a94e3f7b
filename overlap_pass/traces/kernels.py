"""Which events ran on the device, and whether each computes, communicates or copies.

An event is communication by the first rule that fires, and the rule is kept:

1. ``ARGUMENTS``: the event names its collective (torch 2.4 and later).
2. ``LAUNCH``: the innermost CPU op around its launch is a collective's. This finds copy-engine collectives too, which are
   plain memory copies on the device, and leaves the copies in and out of a collective alone: those are launched by an
   ``aten`` op.
3. ``NAME``: the kernel's name is one of NCCL, RCCL, MSCCL, NVSHMEM, symmetric memory or a custom all-reduce.
4. ``ANNOTATION``: it lies inside an ``nccl:`` range on its own stream.

Every other kernel is compute: a list of names for compute would miss half of the kernels of a real model.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlap_pass.timeline.intervals import Interval, union
from overlap_pass.timeline.spans import Span, SpanKind
from overlap_pass.traces.collectives import Match, Transport, collective_kind, match_of, payload_bytes, transport_of
from overlap_pass.traces.in_order import link_in_order
from overlap_pass.traces.launches import Launch, Launches
from overlap_pass.traces.names import (
    copies_for_peers,
    is_collective_kernel,
    is_copy_kernel,
    is_helper,
    is_peer_copy,
    issues_collective,
    shape_of,
)
from overlap_pass.traces.records import Event

__all__ = ["DeviceEvent", "Rule", "device_events"]

_KERNELS = frozenset({"kernel", "concurrent_kernel"})
_COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})


class Rule(enum.StrEnum):
    """Why an event counts as communication; see the module's text."""

    ARGUMENTS = "arguments"
    LAUNCH = "launch"
    NAME = "name"
    ANNOTATION = "annotation"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """One thing that ran on a device.

    Attributes:
        span: what and when, on the clock of the file.
        device: its number.
        rule: why it is communication, ``None`` where it is not.
        launch: the CPU's call behind it; ``None`` where the file does not hold it, which happens for work that was
            queued before the profiler started.
        transport: what moved the bytes of a collective.
        match: what tells the same collective on other ranks.
        shape: name and grid of a kernel, which two runs of the same work share; ``""`` for anything else.
        helper: copies into or out of a collective's buffer.
    """

    span: Span
    device: int
    rule: Rule | None
    launch: Launch | None
    transport: Transport | None = None
    match: Match | None = None
    shape: str = ""
    helper: bool = False

    @property
    def launch_ns(self) -> int | None:
        """When the CPU began to launch it, where known."""
        return None if self.launch is None else self.launch.start_ns

    @property
    def graph(self) -> bool:
        """Whether it was launched as part of a CUDA graph."""
        return self.launch is not None and "GraphLaunch" in self.launch.call


def device_events(events: Sequence[Event], launches: Launches) -> tuple[DeviceEvent, ...]:
    """The events that ran on a device and took time, sorted by (start, lane, name)."""
    on_device = [e for e in events if (e.category in _KERNELS or e.category in _COPIES) and e.start_ns < e.end_ns]
    streams = _streams(on_device, _collective_ranges(events))
    linked = link_in_order(on_device, launches.of(on_device), launches.unanswered)
    found = [
        _device_event(event, launch, streams[event.pid, event.tid, event.device, event.stream])
        for event, launch in zip(on_device, linked, strict=True)
    ]
    return tuple(sorted(found, key=lambda e: (e.span.start_ns, e.span.lane, e.span.name)))


class _Stream(NamedTuple):
    """Where events ran: the device's number, the lane, and where ``nccl:`` annotations lie on it."""

    device: int
    lane: str
    ranges: Sequence[Interval]


def _streams(
    events: Iterable[Event], ranges: Mapping[tuple[int | str, int, str], Sequence[Interval]]
) -> dict[tuple[object, ...], _Stream]:
    """What an event says of its place → the stream: thousands of events share a few."""
    firsts = {(event.pid, event.tid, event.device, event.stream): event for event in events}
    numbers = _device_numbers(firsts.values())
    return {
        place: _Stream(numbers[_device(event)], _lane(event), ranges.get((*_device(event), _lane(event)), ()))
        for place, event in firsts.items()
    }


def _device_event(event: Event, launch: Launch | None, stream: _Stream) -> DeviceEvent:
    op = launch.within.op if launch and not launch.in_order else ""
    rule = _rule(event, op, stream.ranges)
    kind = SpanKind.COMMUNICATION if rule else _kind_without_rule(event)
    within = launch.within.op if launch else ""
    issued = within if issues_collective(within) or copies_for_peers(within) else ""
    collective = collective_kind(event.args, issued, event.name) if rule else None
    return DeviceEvent(
        span=Span(
            name=event.name,
            kind=kind,
            lane=stream.lane,
            start_ns=event.start_ns,
            end_ns=event.end_ns,
            collective=collective,
            payload_bytes=payload_bytes(event.args) if rule else None,
            unit=launch.within.unit if rule and launch else None,
        ),
        device=stream.device,
        rule=rule,
        launch=launch,
        transport=transport_of(event.category in _COPIES, event.name) if rule else None,
        match=match_of(event.args, collective) if rule else None,
        shape=shape_of(event.name, event.grid) if kind is SpanKind.COMPUTE else "",
        helper=kind is SpanKind.COMPUTE and launch is not None and is_helper(launch.within.op, launch.within.hook),
    )


def _rule(event: Event, op: str, ranges: Sequence[Interval]) -> Rule | None:
    if "Collective name" in event.args:
        return Rule.ARGUMENTS
    if issues_collective(op) or (event.category in _COPIES and copies_for_peers(op)):
        return Rule.LAUNCH
    if event.category in _KERNELS and is_collective_kernel(event.name):
        return Rule.NAME
    if event.category in _COPIES and is_peer_copy(event.name):
        return Rule.NAME
    if _is_inside(event, ranges):
        return Rule.ANNOTATION
    return None


def _kind_without_rule(event: Event) -> SpanKind:
    if event.category in _COPIES or is_copy_kernel(event.name):
        return SpanKind.COPY
    return SpanKind.COMPUTE


def _is_inside(event: Event, ranges: Sequence[Interval]) -> bool:
    if not ranges:
        return False
    position = bisect_right(ranges, event.start_ns, key=lambda interval: interval[0]) - 1
    return position >= 0 and event.end_ns <= ranges[position][1]


def _collective_ranges(events: Iterable[Event]) -> dict[tuple[int | str, int, str], list[Interval]]:
    """(device, lane) → where an ``nccl:`` annotation of the device's timeline lies."""
    ranges: dict[tuple[int | str, int, str], list[Interval]] = defaultdict(list)
    for event in events:
        if event.category == "gpu_user_annotation" and event.name.startswith("nccl:"):
            ranges[*_device(event), _lane(event)].append((event.start_ns, event.end_ns))
    return {place: union(intervals) for place, intervals in ranges.items()}


def _device_numbers(events: Iterable[Event]) -> Mapping[tuple[int | str, int], int]:
    """Device → the number it goes by. Kineto's process of a device event is the device; where ranks of several hosts
    were merged into one file, the same number stands for several devices, and all are numbered anew."""
    devices = sorted({_device(event) for event in events}, key=lambda place: (place[1], str(place[0])))
    if len({number for _, number in devices}) == len(devices):
        return {place: place[1] for place in devices}
    return {place: position for position, place in enumerate(devices)}


def _device(event: Event) -> tuple[int | str, int]:
    device = event.pid if event.device is None else event.device
    return event.pid, device if isinstance(device, int) else 0


def _lane(event: Event) -> str:
    stream = str(event.tid).removeprefix("stream ") if event.stream is None else event.stream
    return f"stream {stream}"
