"""A sweep as a page: exposed communication against tokens a rank, falling until it is hidden.

One self-contained file: an inline SVG, a table of the same figures, no script. Colours are CSS variables, so that the
page follows the system's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources

from overlap_pass.report.sweep import HIDDEN_PERCENT, Point, Series, Sweep
from overlap_pass.report.sweep_table import HEADINGS, cells

__all__ = ["render"]

_WIDTH, _HEIGHT = 960, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 190, 24, 48
_COLOURS = 6
_NAME_GAP = 17


def render(sweep: Sweep) -> str:
    """The page as text."""
    style = resources.files("overlap_pass.report").joinpath("assets", "sweep.css").read_text(encoding="utf-8")
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in sweep.setting)
    verdicts = "".join(
        f'<li><i class="s{n % _COLOURS}"></i>{escape(series.verdict)}</li>' for n, series in enumerate(sweep.series)
    )
    refused = "".join(f"<li>{escape(what)}: {escape(why)}</li>" for what, why in sweep.refused)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(sweep.title)}</title><style>{style}</style></head><body>\n<main>\n"
        f"<h1>{escape(sweep.title)}</h1>\n<p>Share of the step in which communication runs and nothing computes, "
        f"predicted. Below {HIDDEN_PERCENT:g} % it counts as hidden.</p>\n"
        f'<figure aria-label="Chart" tabindex="0">{_Chart(sweep).svg()}</figure>\n<ul class="verdicts">{verdicts}</ul>\n{_table(sweep)}\n'
        f"{f'<ul>{refused}</ul>' if refused else ''}<dl>{pairs}</dl>\n</main>\n</body></html>\n"
    )


def _table(sweep: Sweep) -> str:
    heading = "".join(f'<th scope="col">{escape(text)}</th>' for text in HEADINGS)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells(point)) + "</tr>\n"
        for series in sweep.series
        for point in series.points
    )
    return f'<div class="wide" role="region" aria-label="Figures" tabindex="0"><table><thead><tr>{heading}</tr></thead><tbody>{body}</tbody></table></div>'


class _Chart:
    """Logarithmic in tokens, linear in percent."""

    def __init__(self, sweep: Sweep) -> None:
        self._series = sweep.series
        tokens = sorted({point.tokens for point in sweep.points}) or [1]
        self._tokens = tokens
        shares = [share for point in sweep.points for share in (point.exposed_percent, point.written_exposed_percent)]
        self._top = max(10.0, math.ceil(max(shares, default=0.0) / 10) * 10)

    def svg(self) -> str:
        parts = [self._grid(), self._hidden()]
        parts += [self._written(number, series) for number, series in enumerate(self._series)]
        parts += [self._scheduled(number, series) for number, series in enumerate(self._series)]
        parts.append(self._names())
        label = "Exposed share of the step against tokens per rank"
        return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'

    def _x(self, tokens: float) -> float:
        low, high = math.log(self._tokens[0]), math.log(self._tokens[-1])
        share = (math.log(tokens) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, percent: float) -> float:
        return _HEIGHT - _BOTTOM - percent / self._top * (_HEIGHT - _TOP - _BOTTOM)

    def _grid(self) -> str:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        lines = []
        stride = 20 if self._top > 50 else 10 if self._top > 20 else 5
        for percent in range(0, int(self._top) + 1, stride):
            y = self._y(percent)
            lines.append(f'<path class="rule" d="M{_LEFT} {y:.1f}H{right}"/>')
            lines.append(f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>')
        for tokens in self._tokens:
            x = self._x(tokens)
            lines.append(f'<path class="rule" d="M{x:.1f} {bottom}v5"/>')
            lines.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tokens}</text>')
        middle = (_LEFT + right) / 2
        lines.append(
            f'<text class="axis" x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">tokens per rank and step</text>'
        )
        return "".join(lines)

    def _hidden(self) -> str:
        top, right = self._y(HIDDEN_PERCENT), _WIDTH - _RIGHT
        return (
            f'<rect class="hidden" x="{_LEFT}" y="{top:.1f}" width="{right - _LEFT}" '
            f'height="{_HEIGHT - _BOTTOM - top:.1f}"/>'
            f'<text class="tick" x="{_LEFT + 6}" y="{_HEIGHT - _BOTTOM - 6}">hidden</text>'
        )

    def _written(self, number: int, series: Series) -> str:
        shares = [point.written_exposed_percent for point in series.points]
        return f'<path class="written s{number % _COLOURS}" d="{self._line(series.points, shares)}"/>'

    def _scheduled(self, number: int, series: Series) -> str:
        colour = f"s{number % _COLOURS}"
        shares = [point.exposed_percent for point in series.points]
        dots = "".join(
            f'<circle class="{colour}" cx="{self._x(point.tokens):.1f}" cy="{self._y(share):.1f}" r="4">'
            f"<title>{point.tokens} tokens, {point.world_size} ranks: {share:.1f} % exposed</title></circle>"
            for point, share in zip(series.points, shares, strict=True)
        )
        return f'<path class="line {colour}" d="{self._line(series.points, shares)}"/>{dots}{self._crossover(series, colour)}'

    def _crossover(self, series: Series, colour: str) -> str:
        tokens = series.crossover_tokens
        if tokens is None or tokens <= self._tokens[0]:
            return ""
        x, y = self._x(tokens), self._y(HIDDEN_PERCENT)
        return f'<path class="cross {colour}" d="M{x:.1f} {y - 9:.1f}v{_HEIGHT - _BOTTOM - y + 9:.1f}"/>'

    def _line(self, points: Sequence[Point], shares: Sequence[float]) -> str:
        places = [
            f"{self._x(point.tokens):.1f} {self._y(share):.1f}" for point, share in zip(points, shares, strict=True)
        ]
        return "M" + "L".join(places)

    def _names(self) -> str:
        """Names at the right ends of the lines, pushed apart where they would overlap."""
        ends = []
        for number, series in enumerate(self._series):
            last = series.points[-1]
            who = f"{series.world_size} ranks" if self._one_budget() else f"{series.world_size} ranks, {series.budget}"
            ends.append((self._y(last.written_exposed_percent), f"{who}, as written", number))
            ends.append((self._y(last.exposed_percent), f"{who}, scheduled", number))
        placed, lowest = [], float(_HEIGHT - _BOTTOM)
        for y, name, number in sorted(ends, reverse=True):
            lowest = min(y, lowest)
            placed.append(
                f'<text class="name s{number % _COLOURS}" x="{_WIDTH - _RIGHT + 10}" y="{lowest + 4:.1f}">{escape(name)}</text>'
            )
            lowest -= _NAME_GAP
        return "".join(placed)

    def _one_budget(self) -> bool:
        return len({series.budget for series in self._series}) == 1
