"""A comparison for the terminal: one verdict line, one table, the worst collectives, what the figures leave out."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.console import printed
from overlap_pass.report.table import NOT_KNOWN, Tone, caption, rows, time_ns
from overlap_pass.traces.names import function_of
from overlap_pass.units import format_bytes

__all__ = ["render"]

_STYLE = {Tone.BETTER: "green", Tone.WORSE: "red", Tone.SAME: ""}


def render(comparison: Comparison, *, width: int = 100, colour: bool = False) -> str:
    """The report as text, ending in a newline.

    Names are printed as they are: brackets in them are no markup.

    Args:
        width: columns; longer names end in an ellipsis.
        colour: with ANSI colours and bold print.
    """
    return printed(_parts(comparison, width), width=width, colour=colour)


def _parts(comparison: Comparison, width: int) -> Iterator[RenderableType]:
    yield Text(comparison.title, style="bold")
    yield Text(comparison.verdict)
    yield _figures(comparison)
    yield _worst(comparison.after, width)
    yield from (Text(f"Note: {note}", style="dim") for note in comparison.notes)


def _figures(comparison: Comparison) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column(_text(caption(comparison.before)), justify="right")
    table.add_column(_text(caption(comparison.after)), justify="right")
    table.add_column("change", justify="right", no_wrap=True)
    for row in rows(comparison):
        change = Text(row.change, style=_STYLE[row.tone])
        table.add_row(row.name, row.before, row.after, change, style="bold" if row.name == "step" else "")
    return table


def _worst(side: Side, width: int) -> RenderableType:
    worst = side.stats.worst()
    if not worst:
        return Text(f"No collective is exposed in {side.label}.\n")
    table = Table(
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=_text(f"Most exposed in {side.label}"),
        title_justify="left",
    )
    # Kernel names run to hundreds of characters: what the other columns leave is theirs, and no more.
    widths = {"collective": 14, "serves": max(10, width - 60), "lane": 10}
    for heading, columns in widths.items():
        table.add_column(heading, no_wrap=True, overflow="ellipsis", max_width=columns)
    for heading in ("payload", "takes", "exposed"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    for row in worst:
        table.add_row(
            _text(row.collective or "unknown"),
            _text(function_of(row.name)) if row.unit is None else _text(_last(row.unit, widths["serves"])),
            _text(row.lane),
            NOT_KNOWN if row.payload_bytes is None else format_bytes(row.payload_bytes),
            time_ns(row.duration_ns),
            time_ns(row.exposed_ns),
        )
    return table


def _last(unit: str, columns: int) -> str:
    """The end of a module's name, which is what tells ``model.layers.7`` from ``model.layers.8``."""
    return unit if len(unit) <= columns else "…" + unit[1 - columns :]


def _text(name: str) -> Text:
    """A name of the user's: not read for markup."""
    return Text(name)
