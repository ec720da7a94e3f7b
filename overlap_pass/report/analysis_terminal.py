"""An analysis for the terminal: one verdict line, one table, findings, the worst collectives, what is not covered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overlap_pass.report.analysis import AnalysisReport, part, residual_ns
from overlap_pass.report.console import printed
from overlap_pass.report.table import NOT_KNOWN, percent, time_ns
from overlap_pass.traces.advice import IDLE_NAMES, reorder_bound_ns
from overlap_pass.traces.causes import ExposedCause, IdleCause
from overlap_pass.traces.figures import CollectiveFigures, DeviceFigures, StepFigures
from overlap_pass.traces.names import function_of
from overlap_pass.units import format_bytes

__all__ = ["EXPOSED_NAMES", "FigureRow", "figure_rows", "render", "worst"]

_WORST_COUNT = 5
_LEAST_SHOWN = 0.005
"""A cause of idle time with less of the step is left out of the table."""

EXPOSED_NAMES = {
    ExposedCause.BLOCKED: "blocked on the collective",
    ExposedCause.LATE: "CPU late",
    ExposedCause.UNKNOWN: "launch not known",
}


def render(report: AnalysisReport, *, width: int = 100, colour: bool = False) -> str:
    """The report as text, ending in a newline.

    Args:
        report: what to show.
        width: columns; longer names end in an ellipsis.
        colour: with ANSI colours and bold print.
    """
    return printed(_parts(report, width), width=width, colour=colour)


def _parts(report: AnalysisReport, width: int) -> Iterable[RenderableType]:
    yield Text(report.title, style="bold")
    yield Text(report.verdict)
    yield _figures(report, width)
    yield from _findings(report)
    yield _worst(report, width)
    yield from (Text(f"Note: {note}", style="dim") for note in report.notes)


def _shown(report: AnalysisReport, width: int) -> list[DeviceFigures]:
    """As many devices as have room: those with the longest steps, and with room for more than one the shortest one."""
    devices = list(report.analysis.devices)
    longest = sorted(devices, key=lambda device: -device.step.stats.step_ns)
    count = len(devices)
    while count > 1 and _columns(devices) > width:
        count -= 1
        kept = longest[:1] if count == 1 else [*longest[: count - 1], longest[-1]]
        devices = [device for device in report.analysis.devices if device in kept]
    return devices


def _columns(devices: Sequence[DeviceFigures]) -> int:
    """How wide the table of these devices is."""
    rows = list(figure_rows(devices))
    names = max(len(row.name) + 2 * row.detail for row in rows)
    values = (max(len(_caption(device)), *(len(row.value(device)) for row in rows)) for device in devices)
    return 1 + names + sum(2 + value for value in values)


def _caption(device: DeviceFigures) -> str:
    return f"{device.label}, {device.step.name}"


def _figures(report: AnalysisReport, width: int) -> Table:
    devices = _shown(report, width)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    for device in devices:
        table.add_column(Text(_caption(device)), justify="right", overflow="fold")
    if len(devices) < len(report.analysis.devices):
        which = "the longest steps and the shortest" if len(devices) > 1 else "the longest step"
        table.caption = f"{len(devices)} of {len(report.analysis.devices)} devices: {which}"
    for row in figure_rows(devices):
        style = "dim" if row.detail else "bold" if row.name == "step" else ""
        table.add_row(Text("  " * row.detail + row.name), *(Text(row.value(device)) for device in devices), style=style)
    return table


_Value = Callable[[DeviceFigures], str]


@dataclass(frozen=True, slots=True)
class FigureRow:
    """One row of the table: what it is, and how it reads for a device.

    Attributes:
        name: what.
        value: its text, a time and its part of the step two spaces apart.
        detail: part of the row above.
    """

    name: str
    value: _Value
    detail: bool = False


def figure_rows(devices: Sequence[DeviceFigures]) -> Iterator[FigureRow]:
    """The rows for these devices, in reading order; causes that none of them has are left out."""
    yield FigureRow("step", lambda d: time_ns(d.step.stats.step_ns))
    yield FigureRow("compute", _of(lambda s: s.stats.compute_ns))
    yield FigureRow("exposed communication", _of(lambda s: s.stats.exposed_ns))
    for cause, name in EXPOSED_NAMES.items():
        if any(device.step.exposed[cause] for device in devices):
            yield FigureRow(name, _of(_exposed_by(cause)), detail=True)
    if any(device.step.exposed_wait_ns is not None for device in devices):
        yield FigureRow("of it waiting for a rank", _of(lambda s: s.exposed_wait_ns), detail=True)
        yield FigureRow("of it transfer", _of(lambda s: s.exposed_transfer_ns), detail=True)
    yield FigureRow("idle", _of(lambda s: s.stats.idle_ns))
    for idle, name in IDLE_NAMES.items():
        if any(device.step.idle[idle] >= _LEAST_SHOWN * device.step.stats.step_ns > 0 for device in devices):
            yield FigureRow(name, _of(_idle_by(idle)), detail=True)
    yield FigureRow("copies, exposed (residual)", _of(residual_ns))
    yield FigureRow("communication", _of(lambda s: s.stats.communication_ns))
    yield FigureRow("hidden communication", _hidden)
    if any(device.slowdown.factor for device in devices):
        yield FigureRow("compute slower beside it", _slower)
    if any(device.step.helper_ns for device in devices):
        yield FigureRow("copies in and out of buffers", _of(lambda s: s.helper_ns))
    yield FigureRow("reordering saves at most", lambda d: _share(reorder_bound_ns(d), d.step))


def _exposed_by(cause: ExposedCause) -> Callable[[StepFigures], int]:
    return lambda step: step.exposed[cause]


def _idle_by(cause: IdleCause) -> Callable[[StepFigures], int]:
    return lambda step: step.idle[cause]


def _of(value_ns: Callable[[StepFigures], int | None]) -> _Value:
    def text(device: DeviceFigures) -> str:
        value = value_ns(device.step)
        return NOT_KNOWN if value is None else _share(value, device.step)

    return text


def _share(time: int, step: StepFigures) -> str:
    return f"{time_ns(time)}  {part(time, step):>7}"


def _slower(device: DeviceFigures) -> str:
    return f"× {device.slowdown.factor:.2f}" if device.slowdown.factor else NOT_KNOWN


def _hidden(device: DeviceFigures) -> str:
    fraction = device.step.stats.hidden_fraction
    return percent(None if fraction is None else 100 * fraction)


def _findings(report: AnalysisReport) -> Iterable[RenderableType]:
    for number, finding in enumerate(report.findings, 1):
        cost = f"{time_ns(finding.cost_ns)} a step ({100 * finding.share:.1f} %), {finding.device}"
        yield Text(f"{number}. {finding.title}: {cost}", style="bold")
        yield from (Padding(Text(line), (0, 0, 0, 3)) for line in finding.evidence)
        yield Padding(Text(f"→ {finding.action}", style="green"), (0, 0, 0, 3))
    if report.findings:
        yield Text("")


def worst(device: DeviceFigures, count: int = _WORST_COUNT) -> list[CollectiveFigures]:
    """The collectives of the typical step with the most exposed time, worst first."""
    rows = [row for row in device.step.collectives if row.stats.exposed_ns]
    return sorted(rows, key=lambda row: (-row.stats.exposed_ns, row.stats.start_ns, row.stats.name))[:count]


def _worst(report: AnalysisReport, width: int) -> RenderableType:
    device = max(report.analysis.devices, key=lambda device: device.step.stats.exposed_ns)
    rows = worst(device)
    if not rows:
        return Text("No collective is exposed.\n")
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=Text(f"Most exposed in {device.label}, {device.step.name}"),
        title_justify="left",
    )
    widths = {"collective": 14, "serves": max(10, width - 76), "moved by": 16}
    for heading, columns in widths.items():
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=columns)
    for heading in ("payload", "takes", "exposed", "waits"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=7)
    for row in rows:
        stats = row.stats
        table.add_row(
            Text(stats.collective or "unknown"),
            Text(stats.unit or function_of(stats.name)),
            Text(row.transport.value),
            NOT_KNOWN if stats.payload_bytes is None else format_bytes(stats.payload_bytes),
            time_ns(stats.duration_ns),
            time_ns(stats.exposed_ns),
            NOT_KNOWN if row.wait_ns is None else time_ns(row.wait_ns),
        )
    return table
