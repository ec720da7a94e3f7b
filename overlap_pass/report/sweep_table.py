"""A sweep for the terminal: a row for each plan, then the crossovers."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_pass.report.console import printed
from overlap_pass.report.sweep import HIDDEN_PERCENT, Point, Sweep
from overlap_pass.units import format_bytes, format_us

__all__ = ["HEADINGS", "cells", "render"]

HEADINGS = (
    "tokens",
    "ranks",
    "budget",
    "step as written",
    "scheduled",
    "exposed as written",
    "scheduled",
    "peak",
    "gap",
)


def render(sweep: Sweep, *, width: int = 100, colour: bool = False) -> str:
    """The table as text, ending in a newline."""
    return printed(_parts(sweep), width=width, colour=colour)


def _parts(sweep: Sweep) -> Iterator[RenderableType]:
    yield Text(sweep.title, style="bold")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "budget" else "right")
    for series in sweep.series:
        for point in series.points:
            table.add_row(*map(Text, cells(point)))
    yield table
    yield from (Text(series.verdict) for series in sweep.series)
    yield Text(f"Hidden: at most {HIDDEN_PERCENT:g} % of the step is exposed. Predicted.", style="dim")
    yield from (Text(f"{what}: {why}") for what, why in sweep.refused)


def cells(point: Point) -> tuple[str, ...]:
    """One row, as spelled in the terminal and on the page."""
    return (
        str(point.tokens),
        str(point.world_size),
        point.budget,
        format_us(point.written_us),
        format_us(point.step_us, like_us=point.written_us),
        f"{point.written_exposed_percent:.1f} %",
        f"{point.exposed_percent:.1f} %",
        format_bytes(point.peak_bytes),
        f"{point.gap_percent:.1f} %",
    )
