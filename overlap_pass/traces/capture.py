"""From a trace file to measured timelines: ``read_trace(path)``, then ``timelines(capture)``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from overlap_pass.errors import TraceError
from overlap_pass.timeline.spans import Span, Timeline
from overlap_pass.traces.chrome import read_file
from overlap_pass.traces.kernels import DeviceEvent, device_events
from overlap_pass.traces.steps import Step, device_steps

__all__ = ["Capture", "read_trace", "timelines", "whole"]


@dataclass(frozen=True, slots=True)
class Capture:
    """What one trace file says about its devices.

    Attributes:
        path: the file.
        rank, world_size: ``None`` where the file does not say.
        epoch_ns: add it to a time to compare files of one machine.
        events: what ran on the devices, sorted by start.
        steps: device-side steps, partial ones included.
        unlinked: device events whose launch the file does not hold: they count as busy time, and end no step.
        unreadable: broken events that were left out.
    """

    path: str
    rank: int | None
    world_size: int | None
    epoch_ns: int
    events: tuple[DeviceEvent, ...]
    steps: tuple[Step, ...]
    unlinked: int
    unreadable: int

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({event.device for event in self.events}))


def read_trace(path: str | Path) -> Capture:
    """Read a PyTorch profiler trace of one rank (``.json`` or ``.json.gz``).

    Raises:
        TraceError: the file cannot be read, or holds no device events.
    """
    file = read_file(path)
    events = device_events(file.events)
    if not events:
        raise TraceError(
            f"{file.path}: no event of a device among {len(file.events)} events: profile with ProfilerActivity.CUDA, "
            "and wait for the device (torch.cuda.synchronize()) before the profiler stops"
        )
    return Capture(
        path=file.path,
        rank=file.rank,
        world_size=file.world_size,
        epoch_ns=file.epoch_ns,
        events=events,
        steps=device_steps(file.events, events),
        unlinked=sum(event.launch_ns is None for event in events),
        unreadable=file.unreadable,
    )


def timelines(capture: Capture) -> tuple[Timeline, ...]:
    """One measured timeline for each complete step of each device, in order.

    A device without a complete step gives one timeline of everything that it ran, and the label says so. An event that
    crosses the boundary of a step counts on each side for the part that lies there.
    """
    found: list[Timeline] = []
    for device in capture.devices:
        complete = [step for step in capture.steps if step.device == device and not step.partial]
        if complete:
            found.extend(timeline_of(capture, step) for step in complete)
        else:
            found.append(whole(capture, device))
    return tuple(found)


def timeline_of(capture: Capture, step: Step) -> Timeline:
    """The timeline of one step, partial or not."""
    spans = _spans(capture, step.device)
    label = f"{_place(capture, step.device)}, step {step.number}"
    return _cut(f"{label} (partial)" if step.partial else label, spans, step.start_ns, step.end_ns)


def whole(capture: Capture, device: int | None = None) -> Timeline:
    """Everything that a device (by default the first) ran, from its first event to the end of its last."""
    device = capture.devices[0] if device is None else device
    spans = _spans(capture, device)
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    return _cut(f"{_place(capture, device)}, whole trace", spans, start_ns, end_ns)


def _spans(capture: Capture, device: int) -> list[Span]:
    return [event.span for event in capture.events if event.device == device]


def _place(capture: Capture, device: int) -> str:
    place = Path(capture.path).name if capture.rank is None else f"rank {capture.rank}"
    return place if len(capture.devices) == 1 else f"{place}, device {device}"


def _cut(label: str, spans: Iterable[Span], start_ns: int, end_ns: int) -> Timeline:
    inside = (
        replace(span, start_ns=max(span.start_ns, start_ns) - start_ns, end_ns=min(span.end_ns, end_ns) - start_ns)
        for span in spans
        if span.start_ns < end_ns and span.end_ns > start_ns
    )
    ordered = tuple(sorted(inside, key=lambda span: (span.start_ns, span.lane, span.name)))
    return Timeline(label, end_ns - start_ns, ordered, predicted=False)
