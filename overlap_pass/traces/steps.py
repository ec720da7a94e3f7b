"""Where a step begins and ends on the device.

The CPU marks its steps with ``ProfilerStep#n``, and the device runs behind it, by a whole step at times. So the device's
step ends with the last event that was launched inside the CPU's step, and begins where the step before ended::

    CPU      │ProfilerStep#4      │ProfilerStep#5      │
    device        │ launched in #4        │ launched in #5      │
                                          └─ boundary           └─ boundary

The first step of a profiler window has no such left boundary: it is partial, and no figure should rest on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_pass.traces.chrome import Event
from overlap_pass.traces.kernels import DeviceEvent

__all__ = ["Step", "device_steps"]

_MARK = re.compile(r"ProfilerStep#(\d+)$")
# Kineto projects the marks on the device too ("gpu_user_annotation"); those span what it could link and no more.
_MARK_CATEGORIES = frozenset({"user_annotation", "cpu_op", "operator"})


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one device.

    Attributes:
        number: the n of ``ProfilerStep#n``.
        device: the device that the boundaries are of.
        cpu_start_ns, cpu_end_ns: the CPU's mark.
        start_ns, end_ns: the device's window, half-open.
        partial: first of a profiler window: it starts at the CPU's mark, and holds what was queued before.
    """

    number: int
    device: int
    cpu_start_ns: int
    cpu_end_ns: int
    start_ns: int
    end_ns: int
    partial: bool


def device_steps(events: Iterable[Event], on_device: Sequence[DeviceEvent]) -> tuple[Step, ...]:
    """The steps of every device, by device and number.

    A step that launched nothing on a device is left out there, and the one behind it is partial.
    """
    marks = _marks(events)
    return tuple(
        step
        for device in sorted({event.device for event in on_device})
        for step in _steps_of(device, marks, [event for event in on_device if event.device == device])
    )


def _marks(events: Iterable[Event]) -> list[tuple[int, int, int]]:
    """(number, start, end) of the CPU's marks, by number."""
    found: dict[int, tuple[int, int, int]] = {}
    for event in events:
        match = _MARK.match(event.name) if event.category in _MARK_CATEGORIES else None
        if match:
            number = int(match.group(1))
            found.setdefault(number, (number, event.start_ns, event.end_ns))
    return [found[number] for number in sorted(found)]


def _steps_of(device: int, marks: Sequence[tuple[int, int, int]], events: Sequence[DeviceEvent]) -> list[Step]:
    steps: list[Step] = []
    for number, cpu_start_ns, cpu_end_ns in marks:
        ends = [
            event.span.end_ns
            for event in events
            if event.launch_ns is not None and cpu_start_ns <= event.launch_ns < cpu_end_ns
        ]
        if not ends:
            continue
        follows = bool(steps) and steps[-1].number == number - 1
        start_ns = steps[-1].end_ns if follows else cpu_start_ns
        end_ns = max(max(ends), start_ns)
        steps.append(Step(number, device, cpu_start_ns, cpu_end_ns, start_ns, end_ns, partial=not follows))
    return steps
