"""Strategies side by side, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from overlap_pass.report.console import printed
from overlap_pass.report.table import NOT_KNOWN
from overlap_pass.units import format_bytes, format_us

__all__ = ["Row", "beside_one_bound", "render"]


@dataclass(frozen=True, slots=True)
class Row:
    """What one strategy makes of a step.

    Attributes:
        strategy: its spec.
        step_us, exposed_us, peak_bytes: of the plan, all graphs together; ``None`` if it made none.
        bound_us: no order of what it made of the launches (joined or not) and of compute (moved or not) is shorter.
        planning_s: time of planning, tracing left out.
        refused: why it made none.
    """

    strategy: str
    step_us: float | None = None
    exposed_us: float | None = None
    peak_bytes: int | None = None
    bound_us: float | None = None
    planning_s: float = 0.0
    refused: str = ""

    @property
    def gap_percent(self) -> float | None:
        if self.step_us is None or not self.bound_us:
            return None
        return 100 * (self.step_us / self.bound_us - 1)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap_percent": self.gap_percent}


def beside_one_bound(rows: Sequence[Row]) -> list[Row]:
    """The rows with the smallest of their bounds, which holds for all, so that their gaps compare."""
    bound_us = min((row.bound_us for row in rows if row.bound_us is not None), default=None)
    return [row if row.step_us is None else replace(row, bound_us=bound_us) for row in rows]


def render(title: str, rows: Sequence[Row], *, width: int = 100, colour: bool = False) -> str:
    """The table as text, the shortest step in bold; refusals as lines below it."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=Text(title), title_justify="left")
    table.add_column("strategy", no_wrap=True)
    for heading in ("step", "exposed", "peak", "gap to bound", "planning"):
        table.add_column(heading, justify="right", no_wrap=True)
    best_us = min((row.step_us for row in rows if row.step_us is not None), default=None)
    for row in rows:
        style = "bold" if row.step_us is not None and row.step_us == best_us else ""
        table.add_row(Text(row.strategy), *_cells(row), style=style)
    refused = [Text(f"{row.strategy}: {row.refused}") for row in rows if row.refused]
    return printed([table, *refused], width=width, colour=colour)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        NOT_KNOWN if row.step_us is None else format_us(row.step_us),
        NOT_KNOWN if row.exposed_us is None else format_us(row.exposed_us, like_us=row.step_us),
        NOT_KNOWN if row.peak_bytes is None else format_bytes(row.peak_bytes),
        NOT_KNOWN if row.gap_percent is None else f"{row.gap_percent:.1f} %",
        f"{row.planning_s:.1f} s",
    )
