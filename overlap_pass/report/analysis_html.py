"""An analysis as one self-contained page: opens offline, asks nobody for anything, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources

from overlap_pass.report.analysis import AnalysisReport, dumps, part
from overlap_pass.report.analysis_terminal import figure_rows, worst
from overlap_pass.report.table import NOT_KNOWN, time_ns, units_kept
from overlap_pass.timeline.spans import SpanKind
from overlap_pass.traces.advice import Finding
from overlap_pass.traces.causes import ExposedCause
from overlap_pass.traces.figures import Analysis, CollectiveFigures, DeviceFigures, StepFigures
from overlap_pass.traces.names import function_of
from overlap_pass.units import format_bytes

__all__ = ["render"]

_SLOT = re.compile(r"<!--slot:(\w+)-->")
# Inside a script element only these can end it, open a comment, or (the separators) break older parsers.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_SCRIPTS = ("analysis_model.js", "stage.js", "controls.js", "analysis_page.js")
_STYLES = ("page.css", "analysis.css")
_MOST_DRAWN = 8
_MOST_COLUMNS = 16
_MOST_STEPS = 48
_WORST_COUNT = 8
_KINDS = tuple(SpanKind)


def render(report: AnalysisReport) -> str:
    """The page as text."""
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    drawn = _drawn_devices(report.analysis)
    slots = {
        "policy": _policy(script),
        "style": "\n".join(_asset(name) for name in _STYLES),
        "script": script,
        "title": escape(report.title),
        "verdict": escape(units_kept(report.verdict)),
        "findings": _findings(report.findings),
        "table": _table(report.analysis.devices[:_MOST_COLUMNS]),
        "steps": _steps(report.analysis.devices),
        "worst": _worst(report.analysis, drawn),
        "waits": _waits(report.analysis),
        "notes": _notes(report),
        "analysis": dumps(report).translate(_ESCAPES),
        "drawn": json.dumps(_drawing(drawn), separators=(",", ":"), allow_nan=False).translate(_ESCAPES),
    }
    # One pass: a name that looks like a slot is text like any other.
    return _SLOT.sub(lambda match: slots[match.group(1)], _asset("analysis.html"))


def _asset(name: str) -> str:
    return resources.files("overlap_pass.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """A content security policy under which the page loads nothing and runs this script only."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _findings(findings: Iterable[Finding]) -> str:
    items = "".join(_finding(finding) for finding in findings)
    return f'<ol class="findings">{items}</ol>' if items else "<p>Nothing that costs 2 % of the step or more.</p>"


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(line)}</li>" for line in finding.evidence)
    cost = f"<b>{time_ns(finding.cost_ns)}</b> a step, {100 * finding.share:.1f} %"
    return (
        f'<li><b>{escape(finding.title)}</b><span class="cost">{cost}, {escape(finding.device)}</span>'
        f"<ul>{evidence}</ul><p>{escape(finding.action)}</p></li>\n"
    )


def _table(devices: tuple[DeviceFigures, ...]) -> str:
    heading = "".join(
        f'<th scope="col">{escape(device.label)}<br>{escape(device.step.name)}</th>' for device in devices
    )
    rows = []
    for row in figure_rows(list(devices)):
        cells = "".join(f"<td>{_cell(row.value(device))}</td>" for device in devices)
        cause = ' class="cause"' if row.detail else ""
        rows.append(f'<tr{cause}><th scope="row">{escape(row.name)}</th>{cells}</tr>\n')
    return f'<table class="figures"><thead><tr><td></td>{heading}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _cell(value: str) -> str:
    """A time, and its part of the step in smaller letters."""
    time, gap, share = value.partition("  ")
    return f"{escape(time)} <small>{escape(share.strip())}</small>" if gap else escape(value)


def _steps(devices: tuple[DeviceFigures, ...]) -> str:
    """A stacked bar for each step, all on one scale; of many, those from the typical one on of each device."""
    each = max(1, _MOST_STEPS // len(devices))
    shown = [(device, step) for device in devices for step in _some(device, each)][: 4 * _MOST_STEPS]
    scale_ns = max((step.stats.step_ns for _, step in shown), default=1) or 1
    rows = "".join(_step_row(device, step, scale_ns) for device, step in shown)
    total = sum(len(device.steps) for device in devices)
    more = f'<p class="hint">{len(shown)} of {total} steps</p>' if len(shown) < total else ""
    return rows + more


def _some(device: DeviceFigures, count: int) -> tuple[StepFigures, ...]:
    first = 0 if len(device.steps) <= count else min(device.typical, len(device.steps) - count)
    return device.steps[first : first + count]


def _step_row(device: DeviceFigures, step: StepFigures, scale_ns: int) -> str:
    stats = step.stats
    parts = (
        ("compute", "compute", stats.compute_ns),
        ("blocked", "exposed communication, blocked", step.exposed[ExposedCause.BLOCKED]),
        ("late", "exposed communication, CPU late", step.exposed[ExposedCause.LATE]),
        ("untold", "exposed communication, launch not known", step.exposed[ExposedCause.UNKNOWN]),
        ("copy", "copies, exposed", stats.exposed_copy_ns),
        ("idle", "idle", stats.idle_ns),
    )
    bar = "".join(
        f'<span class="{kind}" style="width:{100 * time / scale_ns:.3f}%" title="{name} {time_ns(time)} ({part(time, step)})"></span>'
        for kind, name, time in parts
        if time
    )
    typical = " typical" if step is device.step else ""
    partial = ", partial" if step.partial else ""
    return (
        f'<span class="who{typical}">{escape(device.label)}, {escape(step.name)}{partial}</span>'
        f'<div class="bar">{bar}</div><span class="long{typical}">{time_ns(stats.step_ns)}</span>\n'
    )


def _drawn_devices(analysis: Analysis) -> list[DeviceFigures]:
    """All devices; of many those with the longest steps, in their order."""
    longest = sorted(analysis.devices, key=lambda device: -device.step.stats.step_ns)[:_MOST_DRAWN]
    return [device for device in analysis.devices if device in longest]


def _drawing(devices: Iterable[DeviceFigures]) -> Mapping[str, object]:
    """Spans by lane; names are given once and numbered."""
    numbers: dict[str, int] = {}
    return {"devices": [_drawn(key, device, numbers) for key, device in enumerate(devices)], "names": list(numbers)}


def _drawn(key: int, device: DeviceFigures, numbers: dict[str, int]) -> Mapping[str, object]:
    step = device.step
    lanes: dict[tuple[int, str], list[list[object]]] = defaultdict(list)
    for span in step.timeline.spans:
        number = numbers.setdefault(span.name, len(numbers))
        row: list[object] = [span.start_ns, span.end_ns, number, span.collective, span.payload_bytes, span.unit]
        lanes[_KINDS.index(span.kind), span.lane].append(row)
    return {
        "key": str(key),
        "label": step.timeline.label,
        "window_ns": step.stats.step_ns,
        "lanes": [
            {"kind": kind, "lane": lane, "spans": lanes[kind, lane]} for kind, lane in sorted(lanes, key=_lane_order)
        ],
        "exposed": step.exposed_parts,
        "late": step.late_parts,
    }


def _lane_order(lane: tuple[int, str]) -> tuple[int, int, str]:
    digits = re.search(r"\d+", lane[1])
    return lane[0], int(digits[0]) if digits else 0, lane[1]


def _worst(analysis: Analysis, drawn: list[DeviceFigures]) -> str:
    rows = sorted(
        ((device, row) for device in analysis.devices for row in worst(device, _WORST_COUNT)),
        key=lambda pair: (-pair[1].stats.exposed_ns, pair[0].label, pair[1].stats.start_ns),
    )[:_WORST_COUNT]
    if not rows:
        return "<p>No collective is exposed.</p>"
    longest_ns = rows[0][1].stats.exposed_ns
    heads = ("collective", "device", "moved by", "payload", "takes", "blocked", "waits for a rank", "exposed")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(_worst_row(device, row, drawn, longest_ns) for device, row in rows)
    return f'<table class="worst"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _worst_row(device: DeviceFigures, row: CollectiveFigures, drawn: list[DeviceFigures], longest_ns: int) -> str:
    stats = row.stats
    name = f"<b>{escape(stats.collective or 'collective')}</b> <span>{escape(stats.unit or function_of(stats.name))}</span>"
    if device in drawn:
        place = f'data-side="{drawn.index(device)}" data-lane="{escape(stats.lane)}" data-start="{stats.start_ns}" data-name="{escape(stats.name)}"'
        name = f'<button type="button" class="find" {place} title="Show in the timeline">{name}</button>'
    cells = (
        escape(device.label),
        row.transport.value,
        NOT_KNOWN if stats.payload_bytes is None else format_bytes(stats.payload_bytes),
        time_ns(stats.duration_ns),
        time_ns(row.blocked_ns),
        NOT_KNOWN if row.wait_ns is None else time_ns(row.wait_ns),
    )
    share = 100 * stats.exposed_ns / longest_ns
    return (
        f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}"
        f'<td class="meter">{time_ns(stats.exposed_ns)}<i style="width:{share:.1f}%"></i></td></tr>\n'
    )


def _waits(analysis: Analysis) -> str:
    """Rank × collective, red where a collective waited for another rank; one column for each collective of a step."""
    if analysis.late_ns is None:
        return ""
    columns: dict[tuple[str, str, int], dict[int, CollectiveFigures]] = {}
    number = analysis.slowest.step.number
    for r, device in enumerate(analysis.devices):
        seen: Counter[tuple[str, str]] = Counter()
        step = next((step for step in device.steps if step.number == number), device.step)
        for row in step.collectives:
            key = row.group, row.stats.collective or ""
            columns.setdefault((*key, seen[key]), {})[r] = row
            seen[key] += 1
    longest_ns = max((row.wait_ns or 0 for cells in columns.values() for row in cells.values()), default=0) or 1
    size = max(3.0, min(24.0, 1000 / max(1, len(columns))))
    body = "".join(
        _heat_cell(r, i, device, cells.get(r), longest_ns, size)
        for r, device in enumerate(analysis.devices)
        for i, cells in enumerate(columns.values())
    )
    labels = "".join(
        f'<text x="0" y="{22 * r + 15}">{escape(device.label)}</text>' for r, device in enumerate(analysis.devices)
    )
    width, height = 160 + size * len(columns), 22 * len(analysis.devices)
    late = ", ".join(
        f"{device.label} {time_ns(time)}" for device, time in zip(analysis.devices, analysis.late_ns, strict=True)
    )
    return (
        '<section aria-labelledby="waits-title"><h2 id="waits-title">Who waits for whom</h2>'
        f'<div class="wide" role="region" aria-label="Chart of waits" tabindex="0">'
        f'<svg class="heat" viewBox="0 0 {width:.0f} {height}" style="max-width:{width:.0f}px" role="img" '
        f'aria-label="Wait for other ranks by rank and collective">{labels}{body}</svg></div>'
        f'<p class="hint">One column for each collective of {escape(analysis.slowest.step.name)}, in order; full red is '
        f"{time_ns(longest_ns)}. Others waited for: {escape(late)}.</p></section>"
    )


def _heat_cell(
    r: int, i: int, device: DeviceFigures, row: CollectiveFigures | None, longest_ns: int, size: float
) -> str:
    place = f'x="{160 + size * i:.1f}" y="{22 * r + 1}" width="{max(2.0, size - 1):.1f}" height="20"'
    if row is None or row.wait_ns is None:
        return f'<rect class="none" {place}/>'
    strength = max(0.06, row.wait_ns / longest_ns)
    title = (
        f"{device.label}, {row.stats.collective or 'collective'} {row.stats.unit or ''}: waits {time_ns(row.wait_ns)}"
    )
    return f'<rect {place} fill-opacity="{strength:.3f}"><title>{escape(title)}</title></rect>'


def _notes(report: AnalysisReport) -> str:
    notes = list(report.notes)
    count = len(report.analysis.devices)
    if count > _MOST_DRAWN:
        notes.append(f"The timelines show the {_MOST_DRAWN} of {count} devices with the longest steps.")
    return f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
