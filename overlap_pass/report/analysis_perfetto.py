"""Annotations for Perfetto: a trace that holds only what the analysis found, to be opened beside the original.

Async events ("b", "e") are used, because Perfetto drops complete events that overlap on one track.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlap_pass.report.analysis import AnalysisReport
from overlap_pass.timeline.intervals import Interval, difference
from overlap_pass.traces.figures import DeviceFigures, StepFigures

__all__ = ["render"]


def render(report: AnalysisReport) -> str:
    """A Chrome trace: one process for each device, tracks for steps, exposed time by cause, and exposed collectives.

    Times are on the clock of the device's own file.
    """
    rows: list[str] = []
    for process, device in enumerate(report.analysis.devices):
        name = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"overlap-pass: {device.label}"}}
        rows.append(_text(name))
        rows.extend(row for spans in _tracks(_device(device)) for row in _written(process, spans))
    return '{"displayTimeUnit":"ns","traceEvents":[\n' + ",\n".join(rows) + "\n]}\n"


@dataclass(frozen=True, slots=True)
class _Mark:
    """One annotation: where it goes, what it says, and when, on the file's clock."""

    track: str
    name: str
    time: Interval
    figures: Mapping[str, float | str | bool]


def _tracks(marks: Iterable[_Mark]) -> Iterator[list[_Mark]]:
    """The marks in rows in which none overlaps another: what shares a row shares an id, and Perfetto nests by id."""
    rows: dict[str, list[list[_Mark]]] = defaultdict(list)
    for mark in sorted(marks, key=lambda mark: mark.time):
        free = next((row for row in rows[mark.track] if row[-1].time[1] <= mark.time[0]), None)
        if free is None:
            rows[mark.track].append([mark])
        else:
            free.append(mark)
    return (row for track in rows.values() for row in track)


def _written(process: int, row: Sequence[_Mark]) -> Iterator[str]:
    first = row[0]
    for mark in row:
        begin = {
            "cat": mark.track,
            "name": mark.name,
            "pid": process,
            "tid": 0,
            "id": f"{process} {mark.track} {first.time[0]}",
        }
        yield _timed({**begin, "ph": "b", "args": dict(mark.figures)}, mark.time[0])
        yield _timed({**begin, "ph": "e"}, mark.time[1])


def _timed(event: Mapping[str, object], time_ns: int) -> str:
    """A float of an epoch in microseconds has no nanoseconds left, so the time is written as digits."""
    whole, rest = divmod(time_ns, 1000)
    return f'{_text(event)[:-1]},"ts":{whole}.{rest:03d}}}'


def _text(event: Mapping[str, object]) -> str:
    return json.dumps(event, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _device(device: DeviceFigures) -> Iterator[_Mark]:
    for step in device.steps:
        yield _Mark("step", step.name, (step.start_ns, step.end_ns), _figures(step))
        late = [(start + step.start_ns, end + step.start_ns) for start, end in step.late_parts]
        exposed = [(start + step.start_ns, end + step.start_ns) for start, end in step.exposed_parts]
        yield from (_Mark("exposed", "CPU late", time, {}) for time in late)
        yield from (_Mark("exposed", "blocked", time, {}) for time in difference(exposed, late))
        yield from _collectives(step)


def _collectives(step: StepFigures) -> Iterator[_Mark]:
    for row in step.collectives:
        stats = row.stats
        start_ns = step.start_ns + stats.start_ns
        name = f"{stats.collective or 'collective'} {stats.unit or ''}".rstrip()
        if row.wait_ns:
            yield _Mark("waits for a rank", name, (start_ns, start_ns + row.wait_ns), {"wait_us": row.wait_ns / 1000})
        if stats.exposed_ns:
            figures = {
                "exposed_us": stats.exposed_ns / 1000,
                "blocked_us": row.blocked_ns / 1000,
                "moved_by": row.transport.value,
            }
            yield _Mark("exposed collectives", name, (start_ns, start_ns + stats.duration_ns), figures)


def _figures(step: StepFigures) -> Mapping[str, float | bool]:
    stats = step.stats
    return {
        "compute_us": stats.compute_ns / 1000,
        "exposed_us": stats.exposed_ns / 1000,
        "idle_us": stats.idle_ns / 1000,
        "partial": step.partial,
    }
