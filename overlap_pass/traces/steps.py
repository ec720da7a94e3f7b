"""Where a step begins and ends on the device.

The CPU marks its steps with ``ProfilerStep#n`` (or :mod:`overlap_pass.traces.periods` tells them), and the device runs behind it, by a whole step at times. So the device's
step ends with the last event that was launched inside the CPU's step, and begins where the step before ended::

    CPU      │ProfilerStep#4      │ProfilerStep#5      │
    device        │ launched in #4        │ launched in #5      │
                                          └─ boundary           └─ boundary

The first step of a profiler window has no such left boundary: it is partial, and begins at the CPU's mark. Where the device
had no or little work of an earlier step left to do there, its figures are as good as any.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_pass.timeline.intervals import total_ns, union
from overlap_pass.traces.kernels import DeviceEvent
from overlap_pass.traces.records import Mark

__all__ = ["LARGEST_BACKLOG", "Step", "device_steps", "without_device_events"]

LARGEST_BACKLOG = 0.1
"""Part of a partial step that work of an earlier step may take for the step to count."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one device.

    Attributes:
        number: the n of ``ProfilerStep#n``, else counted from 0.
        device: the device that the boundaries are of.
        cpu_start_ns, cpu_end_ns: the CPU's mark.
        start_ns, end_ns: the device's window, half-open.
        partial: it has no left boundary (first of a profiler window), or the file ends inside it.
        cut: the file ends inside it.
        backlog_ns: how long the device was busy in it with what was launched before the CPU's mark.
    """

    number: int
    device: int
    cpu_start_ns: int
    cpu_end_ns: int
    start_ns: int
    end_ns: int
    partial: bool
    cut: bool = False
    backlog_ns: int = 0

    @property
    def counts(self) -> bool:
        """Whether medians may rest on it: complete, or begun with next to no work of an earlier step."""
        length_ns = self.end_ns - self.start_ns
        return not self.partial or (not self.cut and self.backlog_ns <= LARGEST_BACKLOG * length_ns)


def device_steps(marks: Iterable[Mark], on_device: Sequence[DeviceEvent], *, cut: bool = False) -> tuple[Step, ...]:
    """The steps of every device, by device and number; ``cut`` says that the file ends before its time.

    A step that launched nothing on a device is left out there, and the one behind it is partial.
    """
    marks = list(marks)
    by_device: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in on_device:
        by_device[event.device].append(event)
    return tuple(
        step
        for device in sorted(by_device)
        for step in _steps_of(device, _marks_of(marks, by_device[device]), by_device[device], cut)
    )


def without_device_events(marks: Iterable[Mark], steps: Iterable[Step]) -> list[int]:
    """Numbers of the CPU's steps that launched nothing on any device, or whose device events are missing."""
    found = {step.number for step in steps}
    return sorted({mark.number for mark in marks} - found)


def _marks_of(marks: Sequence[Mark], events: Iterable[DeviceEvent]) -> list[Mark]:
    """The first mark of each number, by number: those of the process that launches on the device, if it has any."""
    pids = Counter(event.launch.place[0] for event in events if event.launch is not None)
    owner = pids.most_common(1)[0][0] if pids else None
    found: dict[int, Mark] = {}
    for mark in sorted(marks, key=lambda mark: (mark.pid != owner, mark.start_ns)):
        if mark.pid == owner or not found or next(iter(found.values())).pid != owner:
            found.setdefault(mark.number, mark)
    return [found[number] for number in sorted(found)]


def _steps_of(device: int, marks: Sequence[Mark], events: Sequence[DeviceEvent], cut: bool) -> list[Step]:
    ends = _last_ends(marks, events)
    numbers = [mark.number for mark in marks if mark.number in ends]
    steps: list[Step] = []
    for mark in marks:
        if mark.number not in ends:
            continue
        follows = bool(steps) and steps[-1].number == mark.number - 1
        start_ns = steps[-1].end_ns if follows else mark.start_ns
        end_ns = max(ends[mark.number], start_ns)
        is_cut = cut and mark.number == numbers[-1]
        backlog_ns = 0 if follows else _backlog_ns(events, mark.start_ns, end_ns)
        steps.append(
            Step(
                mark.number,
                device,
                mark.start_ns,
                mark.end_ns,
                start_ns,
                end_ns,
                partial=not follows or is_cut,
                cut=is_cut,
                backlog_ns=backlog_ns,
            )
        )
    return steps


def _last_ends(marks: Sequence[Mark], events: Iterable[DeviceEvent]) -> dict[int, int]:
    """Number of a mark → when the last event that was launched inside it ends; without those that launched nothing."""
    launched = sorted((event.launch.start_ns, event.span.end_ns) for event in events if event.launch is not None)
    ends: dict[int, int] = {}
    for mark in marks:
        first = bisect_left(launched, (mark.start_ns,))
        last = bisect_left(launched, (mark.end_ns,))
        if first < last:
            ends[mark.number] = max(end_ns for _, end_ns in launched[first:last])
    return ends


def _backlog_ns(events: Iterable[DeviceEvent], start_ns: int, end_ns: int) -> int:
    earlier = (
        (max(event.span.start_ns, start_ns), min(event.span.end_ns, end_ns))
        for event in events
        if event.launch_ns is None or event.launch_ns < start_ns
    )
    return total_ns(union(earlier))
