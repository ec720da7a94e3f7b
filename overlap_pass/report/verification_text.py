"""A verification for the terminal: the verdict, one row for each system, numbers, what the trace says."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_pass.report.console import printed
from overlap_pass.report.verification import Measured, SystemKind, Verification
from overlap_pass.units import format_bytes, format_us, ns_to_us

__all__ = ["render"]

_NONE = "–"


def render(verification: Verification, *, width: int = 120, colour: bool = False) -> str:
    """The measured systems as text, ending in a newline."""
    return printed(_parts(verification), width=width, colour=colour)


def _parts(verification: Verification) -> Iterator[RenderableType]:
    yield Text(verification.title, style="bold")
    yield Text(verification.verdict)
    yield _table(verification)
    for cause in verification.causes:
        yield Text(f"why: {cause}")
    for line in verification.scheduled.prediction_lines:
        yield Text(line)
    for warning in verification.warnings:
        yield Text(f"warning: {warning}")
    for left in verification.left_out:
        yield Text(f"left out: {left.name} ({left.reason})")
    for name, value in verification.setting:
        yield Text(f"{name}: {value}", style="dim")


def _table(verification: Verification) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("system", no_wrap=True)
    for heading in ("step", "95 % interval", "compute", "exposed", "idle", "peak", "reserved", "numbers"):
        table.add_column(heading, justify="right", no_wrap=True)
    compared = any(system.agreement is not None for system in verification.systems)
    for system in verification.systems:
        style = "bold" if system is verification.scheduled else ""
        table.add_row(*map(Text, _cells(system, compared)), style=style)
    return table


def _cells(system: Measured, compared: bool) -> list[str]:
    interval = system.interval_us
    stats = system.side.stats if system.side is not None else None
    traced = [_NONE] * 3
    if stats is not None:
        traced = [format_us(ns_to_us(value)) for value in (stats.compute_ns, stats.exposed_ns, stats.idle_ns)]
    return [
        system.name,
        format_us(system.median_us),
        f"{interval.low / 1000:.1f}–{interval.high / 1000:.1f} ms",
        *traced,
        format_bytes(system.peak_bytes) if system.peak_bytes else _NONE,
        format_bytes(system.reserved_bytes) if system.reserved_bytes else _NONE,
        _numbers(system, compared),
    ]


def _numbers(system: Measured, compared: bool) -> str:
    found = system.agreement
    if found is None:
        return "reference" if compared and system.kind is not SystemKind.FLOOR else _NONE
    if found.exact:
        return f"= {found.reference}"
    error = "missing" if found.worst_relative is None else f"{found.worst_relative:.1e}"
    return f"{'WRONG ' if system.wrong else ''}±{error} {found.reference}"
