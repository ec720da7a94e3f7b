"""A comparison as one self-contained page: opens offline, asks nobody for anything, and runs no script but its own.

What can be text is text that this file writes, escaped; the timelines and the decisions are drawn by the scripts
in ``assets`` from the comparison's JSON, which the page carries and offers for download.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from html import escape
from importlib import resources

from overlap_pass.report import jsonfile
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.table import NOT_KNOWN, Row, caption, rows, time_ns, units_kept
from overlap_pass.timeline.stats import CollectiveStats, exposed_intervals
from overlap_pass.traces.names import function_of
from overlap_pass.units import format_bytes, format_us, ns_to_us

__all__ = ["render"]

_WORST_COUNT = 8
_SLOT = re.compile(r"<!--slot:(\w+)-->")
# Inside a script element only these can end it, open a comment, or (the separators) break older parsers.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
_SCRIPTS = ("model.js", "stage.js", "controls.js", "page.js")
_SEGMENTS = {
    "compute": "compute",
    "exposed": "exposed communication",
    "copy": "copies, exposed",
    "idle": "idle",
}


def render(comparison: Comparison) -> str:
    """The page as text.

    Raises:
        PlanError: a figure is infinite or not a number.
    """
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    exposed = {
        "before": exposed_intervals(comparison.before.timeline),
        "after": exposed_intervals(comparison.after.timeline),
    }
    slots = {
        "policy": _policy(script),
        "style": _asset("page.css"),
        "script": script,
        "title": escape(comparison.title),
        "verdict": escape(units_kept(comparison.verdict)),
        "table": _table(comparison),
        "bars": _bars(comparison),
        "worst": _worst("before", comparison.before) + _worst("after", comparison.after),
        "setting": _setting(comparison.setting),
        "notes": _notes(comparison.notes),
        "comparison": jsonfile.dumps(comparison).translate(_ESCAPES),
        "exposed": json.dumps(exposed, separators=(",", ":")),
    }
    # One pass: a name that looks like a slot is text like any other.
    return _SLOT.sub(lambda match: slots[match.group(1)], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files("overlap_pass.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """A content security policy under which the page loads nothing and runs this script only."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _table(comparison: Comparison) -> str:
    heading = "".join(f'<th scope="col">{escape(caption(side))}</th>' for side in (comparison.before, comparison.after))
    body = "".join(_table_row(row) for row in rows(comparison))
    return (
        f'<table class="figures"><thead><tr><td></td>{heading}<th scope="col">change</th></tr></thead>'
        f"<tbody>{body}</tbody></table>"
    )


def _table_row(row: Row) -> str:
    cells = f"<td>{escape(row.before)}</td><td>{escape(row.after)}</td>"
    return f'<tr><th scope="row">{escape(row.name)}</th>{cells}<td class="{row.tone.value}">{escape(row.change)}</td></tr>\n'


def _bars(comparison: Comparison) -> str:
    """One stacked bar for each side, on one scale, with the bound marked in both."""
    bound_ns = 1000 * (comparison.bound_us or 0.0)
    scale_ns = max(comparison.before.stats.step_ns, comparison.after.stats.step_ns, 1)
    known = 0 < bound_ns <= scale_ns
    mark = f'<i class="bound" style="left:{100 * bound_ns / scale_ns:.3f}%"></i>' if known else ""
    names = "".join(f'<li><i class="{kind}"></i>{name}</li>' for kind, name in _SEGMENTS.items())
    if known:
        names += f'<li><i class="bound"></i>no schedule is shorter: {format_us(comparison.bound_us or 0.0)}</li>'
    bars = "".join(_bar(side, scale_ns, mark) for side in (comparison.before, comparison.after))
    return f'{bars}<ul class="legend">{names}</ul>'


def _bar(side: Side, scale_ns: int, mark: str) -> str:
    stats = side.stats
    parts_ns = (stats.compute_ns, stats.exposed_ns, stats.exposed_copy_ns, stats.idle_ns)
    segments = "".join(
        _segment(kind, part_ns, scale_ns) for kind, part_ns in zip(_SEGMENTS, parts_ns, strict=True) if part_ns
    )
    return (
        f'<div class="bar-label"><span>{escape(side.label)}</span><span>{time_ns(stats.step_ns)}</span></div>'
        f'<div class="bar">{segments}{mark}</div>\n'
    )


def _segment(kind: str, part_ns: int, scale_ns: int) -> str:
    shown = format_us(ns_to_us(part_ns), like_us=ns_to_us(scale_ns))
    share = 100 * part_ns / scale_ns
    text = shown if share >= 12 else ""
    return f'<span class="{kind}" style="width:{share:.3f}%" title="{_SEGMENTS[kind]} {shown}"><b>{text}</b></span>'


def _worst(key: str, side: Side) -> str:
    worst = side.stats.worst(_WORST_COUNT)
    title = f"<h3>{escape(side.label)}</h3>"
    if not worst:
        return f"<div>{title}<p>No collective is exposed.</p></div>"
    longest_ns = worst[0].exposed_ns
    body = "".join(_worst_row(key, row, longest_ns) for row in worst)
    return (
        f'<div>{title}<table class="worst"><thead><tr><th scope="col">collective</th><th scope="col">payload</th>'
        f'<th scope="col">takes</th><th scope="col">exposed</th></tr></thead><tbody>{body}</tbody></table></div>'
    )


def _worst_row(key: str, row: CollectiveStats, longest_ns: int) -> str:
    payload = NOT_KNOWN if row.payload_bytes is None else format_bytes(row.payload_bytes)
    share = 100 * row.exposed_ns / longest_ns
    place = (
        f'data-side="{key}" data-lane="{escape(row.lane)}" data-start="{row.start_ns}" data-name="{escape(row.name)}"'
    )
    return (
        f'<tr><td><button type="button" class="find" {place} title="Show in the timeline">'
        f"<b>{escape(row.collective or 'collective')}</b> <span>{escape(row.unit or function_of(row.name))}</span></button></td>"
        f"<td>{payload}</td><td>{time_ns(row.duration_ns)}</td>"
        f'<td class="meter">{time_ns(row.exposed_ns)}<i style="width:{share:.1f}%"></i></td></tr>\n'
    )


def _setting(setting: Iterable[tuple[str, str]]) -> str:
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in setting)
    return (
        f'<section aria-labelledby="setting"><h2 id="setting">Setting</h2><dl>{pairs}</dl></section>' if pairs else ""
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<section aria-labelledby="notes"><h2 id="notes">Notes</h2><ul>{items}</ul></section>' if items else ""
