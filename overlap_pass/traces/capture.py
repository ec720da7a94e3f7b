"""From a trace file to measured timelines: ``read_trace(path)``, then ``timelines(capture)``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from overlap_pass.errors import TraceError
from overlap_pass.timeline.spans import Span, Timeline
from overlap_pass.traces.chrome import read_file
from overlap_pass.traces.kernels import DeviceEvent, device_events
from overlap_pass.traces.launches import find_launches
from overlap_pass.traces.periods import StepSource, find_marks
from overlap_pass.traces.records import TraceFile
from overlap_pass.traces.repairs import Repairs, repair
from overlap_pass.traces.source import Progress
from overlap_pass.traces.steps import Step, device_steps, without_device_events

__all__ = ["Capture", "EventIndex", "place_of", "read_trace", "timeline", "timeline_of", "timelines", "whole"]


@dataclass(frozen=True, slots=True)
class Capture:
    """What one trace file says about its devices.

    Attributes:
        path: the file.
        rank, world_size: ``None`` where the file does not say.
        epoch_ns: add it to a time to compare files of one machine.
        events: what ran on the devices, sorted by start.
        devices: their numbers, in order.
        steps: device-side steps, partial ones included.
        steps_from: what told them.
        unlinked: device events whose launch the file does not hold: they count as busy time, and end no step.
        unreadable: broken events that were left out.
        repairs: times of device events that were mended.
        repeated: correlations that several calls share, as in files that several ranks were merged into.
        silent_steps: steps of the CPU without any device event.
        correlations: of all device events, those without a duration included.
        file: what the CPU did.
    """

    path: str
    rank: int | None
    world_size: int | None
    epoch_ns: int
    events: tuple[DeviceEvent, ...]
    devices: tuple[int, ...]
    steps: tuple[Step, ...]
    steps_from: StepSource
    unlinked: int
    unreadable: int
    repairs: Repairs
    repeated: int
    silent_steps: tuple[int, ...]
    correlations: frozenset[int]
    file: TraceFile


def read_trace(path: str | Path, progress: Progress | None = None) -> Capture:
    """Read a PyTorch profiler trace of one rank (``.json`` or ``.json.gz``).

    A file that ends early is read as far as it goes; its last step is then partial.

    Args:
        path: the file.
        progress: called now and then with bytes read and the size of the file.

    Raises:
        TraceError: the file cannot be read, or holds no device events.
    """
    file = read_file(path, progress)
    work, repairs = repair([event for event in file.device if event.category != "gpu_user_annotation"])
    launches = find_launches(file)
    events = device_events(
        [*work, *(event for event in file.device if event.category == "gpu_user_annotation")], launches
    )
    if not events:
        raise TraceError(_nothing(file))
    correlations = frozenset(event.correlation for event in file.device)
    file.device.clear()
    marks, steps_from = find_marks(file, events)
    steps = device_steps(marks, events, cut=bool(file.damage))
    return Capture(
        path=file.path,
        rank=file.rank,
        world_size=file.world_size,
        epoch_ns=file.epoch_ns,
        events=events,
        devices=tuple(sorted({event.device for event in events})),
        steps=steps,
        steps_from=steps_from,
        unlinked=sum(event.launch is None for event in events),
        unreadable=file.unreadable,
        repairs=repairs,
        repeated=launches.repeated,
        silent_steps=tuple(without_device_events(marks, steps)),
        correlations=correlations,
        file=file,
    )


def _nothing(file: TraceFile) -> str:
    faults = [f"{file.unreadable} more are broken"] if file.unreadable else []
    faults += [file.damage] if file.damage else []
    broken = f" ({'; '.join(faults)})" if faults else ""
    return (
        f"{file.path}: no event of a device among {file.seen} events{broken}: profile "
        "with ProfilerActivity.CUDA, and wait for the device (torch.cuda.synchronize()) before the profiler stops"
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
    label = f"{place_of(capture, step.device)}, step {step.number}"
    cut = _index(capture, step.device).within(step.start_ns, step.end_ns)
    return timeline(f"{label} (partial)" if step.partial else label, step.end_ns - step.start_ns, cut)


def whole(capture: Capture, device: int | None = None) -> Timeline:
    """Everything that a device (by default the first) ran, from its first event to the end of its last."""
    device = capture.devices[0] if device is None else device
    spans = [event.span for event in capture.events if event.device == device]
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
    cut = _index(capture, device).within(start_ns, end_ns)
    return timeline(f"{place_of(capture, device)}, whole trace", end_ns - start_ns, cut)


def timeline(label: str, window_ns: int, cut: Iterable[tuple[Span, DeviceEvent]]) -> Timeline:
    """What :meth:`EventIndex.within` gave, as a timeline."""
    return Timeline(label, window_ns, tuple(span for span, _ in cut), predicted=False)


class EventIndex:
    """The events of one device, found by time."""

    def __init__(self, events: Iterable[DeviceEvent]) -> None:
        """``events`` sorted by start."""
        self._events = tuple(events)
        self._starts = [event.span.start_ns for event in self._events]
        # The furthest end so far is sorted, also where streams run at once.
        self._reach = list(accumulate((event.span.end_ns for event in self._events), max))

    def within(self, start_ns: int, end_ns: int) -> list[tuple[Span, DeviceEvent]]:
        """What ran in a window, with the part of it that lies there, from the window's start; in the timeline's order."""
        first, last = bisect_right(self._reach, start_ns), bisect_left(self._starts, end_ns)
        inside = (
            (_part(event.span, start_ns, end_ns), event)
            for event in self._events[first:last]
            if event.span.end_ns > start_ns
        )
        return sorted(inside, key=lambda pair: (pair[0].start_ns, pair[0].lane, pair[0].name))


def place_of(capture: Capture, device: int) -> str:
    """What a device is called: ``"rank 3"``, else the file's name; with the device's number where there are several."""
    place = Path(capture.path).name if capture.rank is None else f"rank {capture.rank}"
    return place if len(capture.devices) == 1 else f"{place}, device {device}"


def _index(capture: Capture, device: int) -> EventIndex:
    return EventIndex(event for event in capture.events if event.device == device)


def _part(span: Span, start_ns: int, end_ns: int) -> Span:
    return Span(
        span.name,
        span.kind,
        span.lane,
        max(span.start_ns, start_ns) - start_ns,
        min(span.end_ns, end_ns) - start_ns,
        span.collective,
        span.payload_bytes,
        span.unit,
    )
