"""Timelines as one SVG, for a page or a README: what runs where, on one time scale, exposed communication hatched red.

Static, self-contained, light or dark as the reader's system is; told apart by shade and hatch as well as by colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from overlap_pass.timeline.intervals import Interval
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.timeline.stats import exposed_intervals
from overlap_pass.units import format_us, ns_to_us

__all__ = ["render"]

_WIDTH, _LEFT, _RIGHT = 960, 92, 12
_CAPTION, _ROW, _BAR, _GAP, _AXIS = 26, 24, 18, 14, 30
_TICKS = 8
_NAMED_PX = 62
"""A bar at least this wide has room for a word."""

_STYLE = """
  text { font: 12px system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; fill: #1c2126 }
  .caption { font-weight: 600; font-size: 13px } .muted { fill: #5f6872 } .inside { fill: #ffffff; font-size: 11px }
  .paper { fill: #ffffff } .track { fill: #f1f2f3 } .rule { stroke: #dcdfe2 } .compute { fill: #40618b } .communication { fill: #9cc7bf }
  .copy { fill: #d1a33c } .exposed { fill: url(#hatch) } .hatch { fill: #c9243b } .hatch + path { stroke: #f0a3ad }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e8ea } .muted { fill: #98a2ab } .inside { fill: #0d1721 } .paper { fill: #171b1f } .track { fill: #21262b }
    .rule { stroke: #2d343a }
    .compute { fill: #7c9dc7 } .communication { fill: #2b6570 } .hatch { fill: #ff7a8a } .hatch + path { stroke: #7d1626 }
  }
"""
_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="hatch" width="6" height="6"/><path d="M0 0V6" stroke-width="2"/></pattern>'
)
_PAPER = '<rect class="paper" width="100%" height="100%" rx="6"/>'
"""A page may be dark while the system is light, or the other way round: the picture brings what it is drawn on."""


def render(timelines: Sequence[tuple[str, Timeline]], *, alt: str) -> str:
    """(caption, timeline) pairs below each other.

    Args:
        alt: what the picture shows, for those who do not see it.
    """
    longest_ns = max((timeline.window_ns for _, timeline in timelines), default=0) or 1
    parts: list[str] = []
    top = 0
    for caption, timeline in timelines:
        block = _Block(timeline, longest_ns, top)
        parts.append(block.draw(caption))
        top += block.height
    parts.append(_axis(longest_ns, top))
    size = f'viewBox="0 0 {_WIDTH} {top + _AXIS}" width="{_WIDTH}" height="{top + _AXIS}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(alt)}">\n<title>{escape(alt)}</title>\n'
        f"<style>{_STYLE}</style>\n<defs>{_HATCH}</defs>\n{_PAPER}\n{''.join(parts)}</svg>\n"
    )


class _Block:
    """One timeline: a caption and a row for each lane, compute first."""

    def __init__(self, timeline: Timeline, longest_ns: int, top: int) -> None:
        self._timeline = timeline
        self._scale = (_WIDTH - _LEFT - _RIGHT) / longest_ns
        self._top = top
        first = {span.lane: span.kind is not SpanKind.COMPUTE for span in reversed(timeline.spans)}
        self._lanes = sorted(first, key=lambda lane: (first[lane], lane))
        self.height = _CAPTION + _ROW * len(self._lanes) + _GAP

    def draw(self, caption: str) -> str:
        end = self._x(self._timeline.window_ns)
        took = format_us(ns_to_us(self._timeline.window_ns))
        parts = [
            f'<text class="caption" x="{_LEFT}" y="{self._top + 18}">{escape(caption)}</text>',
            f'<text class="muted" x="{end:.1f}" y="{self._top + 18}" text-anchor="end">{took}</text>\n',
        ]
        exposed = exposed_intervals(self._timeline)
        for number, lane in enumerate(self._lanes):
            y = self._top + _CAPTION + _ROW * number
            parts.append(f'<text class="muted" x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(lane)}</text>')
            parts.append(f'<rect class="track" x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_BAR}"/>')
            spans = [span for span in self._timeline.spans if span.lane == lane]
            parts.extend(self._span(span, y) for span in spans)
            parts.extend(self._exposed(spans, exposed, y))
            parts.append("\n")
        return "".join(parts)

    def _x(self, time_ns: int) -> float:
        return _LEFT + time_ns * self._scale

    def _bar(self, kind: str, start_ns: int, end_ns: int, y: int) -> str:
        width = max(0.4, (end_ns - start_ns) * self._scale)
        return f'<rect class="{kind}" x="{self._x(start_ns):.1f}" y="{y}" width="{width:.1f}" height="{_BAR}"/>'

    def _span(self, span: Span, y: int) -> str:
        bar = self._bar(span.kind.value, span.start_ns, span.end_ns, y)
        name = {"all_gather": "gather", "reduce_scatter": "reduce"}.get(span.collective or "", "")
        if not name or span.duration_ns * self._scale < _NAMED_PX:
            return bar
        return f'{bar}<text x="{self._x(span.start_ns) + 5:.1f}" y="{y + 13}" class="inside">{name}</text>'

    def _exposed(self, spans: Iterable[Span], exposed: Sequence[Interval], y: int) -> Iterable[str]:
        for span in spans:
            if span.kind is SpanKind.COMMUNICATION:
                for start_ns, end_ns in exposed:
                    start_ns, end_ns = max(start_ns, span.start_ns), min(end_ns, span.end_ns)
                    if start_ns < end_ns:
                        yield self._bar("exposed", start_ns, end_ns, y)


def _axis(longest_ns: int, top: int) -> str:
    step = _round_step(longest_ns / _TICKS)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest_ns
    parts = []
    for number in range(int(longest_ns / step) + 1):
        x = _LEFT + number * step * scale
        parts.append(f'<path class="rule" d="M{x:.1f} {top - 8}v6"/>')
        label = format_us(ns_to_us(round(number * step)), like_us=ns_to_us(longest_ns))
        anchor = "middle" if x < _WIDTH - 4 * _RIGHT else "end"
        parts.append(f'<text class="muted" x="{x:.1f}" y="{top + 12}" text-anchor="{anchor}">{label}</text>')
    return "".join(parts)


def _round_step(least: float) -> float:
    """The next of 1, 2, 5 × a power of ten."""
    power = 1
    while power * 10 <= least:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
