"""Tables of the benches: cells to text, and a line of them."""

from __future__ import annotations

from collections.abc import Sequence

from overlap_pass.simulate.bound import Bound

__all__ = ["gap", "line", "ms", "seconds"]


def line(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Print a row: names to the left, figures to the right."""
    names = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    print(*names, *(cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)), flush=True)


def ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f}"


def seconds(time_s: float) -> str:
    return f"{time_s:.1f}"


def gap(bound: Bound, step_us: float) -> str:
    return f"{bound.gap_percent(step_us):.1f}"
