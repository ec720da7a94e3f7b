"""From captures to figures: :func:`analyse` is what ``overlap-pass analyze`` shows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from overlap_pass.errors import TraceError
from overlap_pass.timeline.intervals import Cover, Interval, difference, intersection, total_ns, union
from overlap_pass.timeline.spans import Span, SpanKind
from overlap_pass.timeline.stats import CollectiveStats, exposed_intervals, measure
from overlap_pass.traces.activity import Activities
from overlap_pass.traces.capture import Capture, EventIndex, place_of, timeline
from overlap_pass.traces.causes import Causes, ExposedCause, IdleCause, find_causes
from overlap_pass.traces.collectives import Match, Transport
from overlap_pass.traces.figures import (
    Analysis,
    CollectiveFigures,
    Coverage,
    DeviceFigures,
    StepFigures,
    SyncFigures,
)
from overlap_pass.traces.kernels import DeviceEvent
from overlap_pass.traces.names import issues_collective
from overlap_pass.traces.periods import StepSource
from overlap_pass.traces.ranks import RankCollective, Waits, find_waits
from overlap_pass.traces.slowdown import find_slowdown
from overlap_pass.traces.steps import Step

__all__ = ["analyse"]


@dataclass(frozen=True, slots=True)
class _Device:
    """One device of one capture, before ranks are compared."""

    capture: Capture
    number: int
    events: tuple[DeviceEvent, ...]
    windows: tuple[Step, ...]
    whole: bool


@dataclass(frozen=True, slots=True)
class _Times:
    """What is known of one device over the whole file, ready to be asked for one step."""

    events: EventIndex
    causes: Causes
    exposed: Mapping[ExposedCause, Cover]
    idle: Mapping[IdleCause, Cover]
    launches: Mapping[bool, Sequence[int]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """How long collectives of one device waited for other ranks, by event; ``alone`` without other ranks."""

    by_event: dict[int, int | None]
    alone: bool

    def part_of(self, event: DeviceEvent) -> Interval:
        """When it waited; empty where that is not known."""
        start_ns = event.span.start_ns
        return start_ns, start_ns + (self.by_event.get(id(event)) or 0)

    def known(self, event: DeviceEvent) -> bool:
        return not self.alone and self.by_event.get(id(event)) is not None


def analyse(captures: Sequence[Capture]) -> Analysis:
    """The figures of every device of every capture.

    Args:
        captures: one for each file; more than one are taken for ranks of one run.

    Raises:
        TraceError: no captures.
    """
    if not captures:
        raise TraceError("no trace to analyze")
    devices = sorted(
        (_device(capture, number) for capture in captures for number in capture.devices),
        key=lambda device: (device.capture.rank is None, device.capture.rank or 0, device.capture.path, device.number),
    )
    collectives = [_collectives(device) for device in devices]
    seen = [[_seen(device, event) for event in rows] for device, rows in zip(devices, collectives, strict=True)]
    # Two traces of one rank are two times, not two ranks: they cannot have waited for each other.
    names = [(device.capture.rank, device.number) for device in devices if device.capture.rank is not None]
    several = len(devices) > 1 and len(set(names)) == len(names)
    waits = find_waits(seen) if several else Waits.unknown(seen)
    alone = len(devices) == 1 or not any(wait is not None for row in waits.waits_ns for wait in row)
    figures = [
        _figures(device, _Waiting({id(e): wait for e, wait in zip(rows, waited, strict=True)}, alone))
        for device, rows, waited in zip(devices, collectives, waits.waits_ns, strict=True)
    ]
    total = sum(map(len, collectives))
    return Analysis(
        devices=tuple(figures),
        late_ns=None if alone else _late_ns(figures, devices, collectives, waits),
        matched=total - waits.unmatched,
        unmatched=waits.unmatched,
        offsets_ns=waits.offsets_ns,
    )


def _device(capture: Capture, number: int) -> _Device:
    events = tuple(event for event in capture.events if event.device == number)
    steps = tuple(step for step in capture.steps if step.device == number)
    if steps:
        return _Device(capture, number, events, steps, whole=False)
    start_ns, end_ns = events[0].span.start_ns, max(event.span.end_ns for event in events)
    whole = Step(0, number, start_ns, end_ns, start_ns, end_ns, partial=False)
    return _Device(capture, number, events, (whole,), whole=True)


def _collectives(device: _Device) -> list[DeviceEvent]:
    return [event for event in device.events if event.rule is not None]


def _seen(device: _Device, event: DeviceEvent) -> RankCollective:
    start_ns = event.span.start_ns
    # Only the profiler counts steps alike on all ranks.
    steps = device.windows if device.capture.steps_from is StepSource.PROFILER else ()
    position = bisect_right(steps, start_ns, key=lambda step: step.start_ns) - 1
    step = steps[position].number if position >= 0 and start_ns < steps[position].end_ns else None
    epoch_ns = device.capture.epoch_ns
    return RankCollective(step, event.match or Match("", "", None), start_ns + epoch_ns, event.span.end_ns + epoch_ns)


def _late_ns(
    figures: Sequence[DeviceFigures],
    devices: Sequence[_Device],
    collectives: Sequence[Sequence[DeviceEvent]],
    waits: Waits,
) -> tuple[int, ...]:
    caused = [0] * len(devices)
    for r, rows in enumerate(collectives):
        step = figures[r].step
        for i, event in enumerate(rows):
            last, wait_ns = waits.last[r][i], waits.waits_ns[r][i]
            if last is not None and wait_ns and step.start_ns <= event.span.start_ns < step.end_ns:
                caused[last] += wait_ns
    return tuple(caused)


def _figures(device: _Device, waiting: _Waiting) -> DeviceFigures:
    capture, events = device.capture, device.events
    first_ns = min(device.windows[0].start_ns, events[0].span.start_ns)
    last_ns = max(event.span.end_ns for event in events)
    causes = find_causes(events, (first_ns, last_ns), Activities(capture.file))
    times = _Times(
        EventIndex(events),
        causes,
        {cause: Cover(parts) for cause, parts in causes.exposed.items()},
        {cause: Cover(parts) for cause, parts in causes.idle.items()},
        _launch_times(device),
    )
    steps = tuple(_step(device, step, times, waiting) for step in device.windows)
    collectives = _collectives(device)
    return DeviceFigures(
        label=place_of(capture, device.number),
        path=capture.path,
        rank=capture.rank,
        world_size=capture.world_size,
        device=device.number,
        steps=steps,
        typical=_typical(steps),
        rules=Counter(event.rule for event in collectives if event.rule is not None),
        transports=Counter(
            (event.span.collective or "unknown", event.transport)
            for event in collectives
            if event.transport is not None
        ),
        slowdown=find_slowdown(events),
        coverage=_coverage(device),
    )


def _typical(steps: Sequence[StepFigures]) -> int:
    candidates = [i for i, step in enumerate(steps) if step.counts] or list(range(len(steps)))
    lengths_ns = sorted(steps[i].stats.step_ns for i in candidates)
    length_ns = lengths_ns[(len(lengths_ns) - 1) // 2]
    return next(i for i in candidates if steps[i].stats.step_ns == length_ns)


def _coverage(device: _Device) -> Coverage:
    capture = device.capture
    marks = sorted((step.cpu_start_ns, step.cpu_end_ns) for step in device.windows)
    return Coverage(
        events=len(device.events),
        unlinked=sum(event.launch is None for event in device.events),
        in_order=sum(event.launch is not None and event.launch.in_order for event in device.events),
        steps_from=capture.steps_from,
        unreadable=capture.unreadable,
        mended=capture.file.mended,
        undecodable=capture.file.undecodable,
        damage=capture.file.damage,
        repairs=capture.repairs,
        repeated=capture.repeated,
        silent_steps=capture.silent_steps,
        graphs=sum(event.graph for event in device.events),
        overlapping_steps=any(after[0] < before[1] for before, after in pairwise(marks)),
        issues_collectives=any(map(issues_collective, capture.file.names)),
    )


def _launch_times(device: _Device) -> dict[bool, list[int]]:
    """Whether its kernel is in the file → when each launch of a kernel by the CPU began.

    Only of files with one device: a launch does not say which one it is for.
    """
    found: dict[bool, list[int]] = {True: [], False: []}
    if device.whole or len(device.capture.devices) > 1 or device.capture.repeated:
        return found
    file = device.capture.file
    is_launch = ["LaunchKernel" in name for name in file.names]
    linked = device.capture.correlations
    for thread in file.threads.values():
        calls = thread.calls
        for i, correlation in enumerate(thread.correlations):
            if correlation and is_launch[calls.names[i]]:
                found[correlation in linked].append(calls.starts_ns[i])
    return {linked: sorted(times) for linked, times in found.items()}


def _step(device: _Device, step: Step, times: _Times, waiting: _Waiting) -> StepFigures:
    window = step.start_ns, step.end_ns
    cut = times.events.within(*window)
    name = "whole trace" if device.whole else f"step {step.number}"
    line = timeline(f"{place_of(device.capture, device.number)}, {name}", window[1] - window[0], cut)
    stats = measure(line)
    exposed = exposed_intervals(line)
    waits = shifted(union(waiting.part_of(event) for _, event in cut), window)
    blocked = shifted(times.causes.exposed[ExposedCause.BLOCKED], window)
    copies = union((span.start_ns, span.end_ns) for span, _ in cut if span.kind is SpanKind.COPY)
    held = _on_compute_stream(cut)
    launched = {
        linked: bisect_left(at, step.cpu_end_ns) - bisect_left(at, step.cpu_start_ns)
        for linked, at in times.launches.items()
    }
    return StepFigures(
        number=None if device.whole else step.number,
        start_ns=step.start_ns,
        end_ns=step.end_ns,
        partial=step.partial,
        counts=step.counts,
        timeline=line,
        stats=stats,
        exposed={cause: cover.within_ns(*window) for cause, cover in times.exposed.items()},
        idle={cause: cover.within_ns(*window) for cause, cover in times.idle.items()},
        exposed_wait_ns=None if waiting.alone else total_ns(intersection(exposed, waits)),
        wait_ns=None if waiting.alone else total_ns(waits),
        reorderable_ns=total_ns(difference(intersection(blocked, _movable(cut, held)), waits)),
        helper_ns=total_ns(union((span.start_ns, span.end_ns) for span, event in cut if event.helper)),
        copies_hide_ns=total_ns(intersection(exposed, copies)),
        exposed_parts=tuple(exposed),
        late_parts=tuple(shifted(times.causes.exposed[ExposedCause.LATE], window)),
        collectives=_collective_figures(
            zip(cut, held, strict=True), stats.per_collective, times.causes, window, waiting
        ),
        syncs=_syncs(times.causes, window),
        kernels_ns=_kernels_ns(cut),
        launches=None if device.whole else sum(launched.values()),
        missing=launched[False],
    )


def _on_compute_stream(cut: Sequence[tuple[Span, DeviceEvent]]) -> list[bool]:
    """For each event, whether it ran on a stream that computes, where no order can hide a collective.

    What a CUDA graph of several branches launches did not: the driver numbers the streams of its branches anew wherever
    they fork or join, and a collective gets the number of compute that ran before or behind it.
    """
    computing = {span.lane for span, _ in cut if span.kind is SpanKind.COMPUTE}
    branches: dict[int | None, set[str]] = defaultdict(set)
    for span, event in cut:
        if event.graph:
            branches[event.launch_ns].add(span.lane)
    return [span.lane in computing and not (event.graph and len(branches[event.launch_ns]) > 1) for span, event in cut]


def _movable(cut: Iterable[tuple[Span, DeviceEvent]], held: Iterable[bool]) -> list[Interval]:
    """Where a collective runs that an order can move and hide."""
    return union(
        (span.start_ns, span.end_ns)
        for (span, event), on_compute in zip(cut, held, strict=True)
        if event.rule is not None and not on_compute
    )


def _collective_figures(
    cut: Iterable[tuple[tuple[Span, DeviceEvent], bool]],
    rows: Iterable[CollectiveStats],
    causes: Causes,
    window: Interval,
    waiting: _Waiting,
) -> tuple[CollectiveFigures, ...]:
    blocked, late = (Cover(shifted(causes.exposed[c], window)) for c in (ExposedCause.BLOCKED, ExposedCause.LATE))
    found = []
    upcoming = iter(rows)
    for (span, event), on_compute in cut:
        if event.rule is None:
            continue
        wait = intersection([waiting.part_of(event)], [window])
        found.append(
            CollectiveFigures(
                stats=next(upcoming),
                rule=event.rule,
                transport=event.transport or Transport.KERNEL,
                group=event.match.group if event.match else "",
                blocked_ns=blocked.within_ns(span.start_ns, span.end_ns),
                late_ns=late.within_ns(span.start_ns, span.end_ns),
                wait_ns=total_ns(wait) if waiting.known(event) else None,
                shares_lane=on_compute,
            )
        )
    return tuple(found)


def _kernels_ns(cut: Iterable[tuple[Span, DeviceEvent]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for span, event in cut:
        if event.shape:
            found[event.shape] += span.duration_ns
    return found


def _syncs(causes: Causes, window: Interval) -> tuple[SyncFigures, ...]:
    totals: dict[tuple[str, str, str | None], list[int]] = defaultdict(list)
    for wait in causes.syncs:
        if wait.sync.start_ns < window[1] and wait.sync.end_ns > window[0]:
            idle_ns = total_ns(intersection(wait.parts, [window]))
            if idle_ns:
                totals[wait.sync.call, wait.sync.op, wait.sync.code].append(idle_ns)
    rows = (SyncFigures(*key, count=len(times), idle_ns=sum(times)) for key, times in totals.items())
    return tuple(sorted(rows, key=lambda row: (-row.idle_ns, row.call, row.op)))


def shifted(times: Sequence[Interval], window: Interval) -> list[Interval]:
    """What of a set lies in a window, counted from its start."""
    first = bisect_right(times, window[0], key=lambda interval: interval[1])
    last = bisect_left(times, window[1], key=lambda interval: interval[0])
    return [(start - window[0], end - window[0]) for start, end in intersection(times[first:last], [window])]
