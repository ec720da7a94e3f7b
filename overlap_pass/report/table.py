"""The before/after table, in words: the same rows for the terminal and the page."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlap_pass.timeline.stats import OverlapStats
from overlap_pass.units import format_bytes, format_us, ns_to_us

if TYPE_CHECKING:
    # Reading traces needs this table and no planner, whose graphs take half a second to import.
    from overlap_pass.report.comparison import Comparison, Side

__all__ = ["Row", "Tone", "caption", "percent", "rows", "time_ns", "units_kept"]

NOT_KNOWN = "–"


class Tone(enum.StrEnum):
    """Whether a change is one that the reader wants."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table, ready to be printed.

    Attributes:
        name: what is compared.
        before, after: the two values with their units; an en dash where not known.
        change: after minus before with its sign; empty where either is not known.
        tone: judges the change as printed, so that a row that shows no difference is ``SAME``; a peak that grew is
            ``SAME`` as long as it stays inside the budget.
    """

    name: str
    before: str
    after: str
    change: str
    tone: Tone


def rows(comparison: Comparison) -> tuple[Row, ...]:
    """The rows of the table, in reading order: the step, what it is made of, memory, and the distance to the bound."""
    before, after = comparison.before, comparison.after
    found = [_step_row(before, after)]
    if before.step_samples_us or after.step_samples_us:
        found.append(_time_row("step, profiled", comparison, lambda stats: stats.step_ns))
    found += [
        _time_row("compute", comparison, lambda stats: stats.compute_ns),
        _time_row("exposed communication", comparison, lambda stats: stats.exposed_ns),
        _hidden_row(comparison),
        _time_row("idle", comparison, lambda stats: stats.idle_ns),
        _time_row("copies, exposed", comparison, lambda stats: stats.exposed_copy_ns),
    ]
    if before.peak_bytes is not None or after.peak_bytes is not None:
        found.append(_peak_row(comparison))
    if after.compiled_peak_bytes is not None:
        found.append(_row("peak, compiled (estimate)", (NOT_KNOWN, format_bytes(after.compiled_peak_bytes)), ""))
    if comparison.bound_us:
        found.append(_gap_row(comparison, comparison.bound_us))
    return tuple(found)


def caption(side: Side) -> str:
    """A side's label, with where its figures come from."""
    return f"{side.label} ({'predicted' if side.predicted else 'measured'})"


def time_ns(time_ns: int) -> str:
    return format_us(ns_to_us(time_ns))


def percent(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.1f} %"


def units_kept(text: str) -> str:
    """The same with no-break spaces between numbers and units, for pages, where any other space may end a line."""
    return re.sub(r"(?<=\d) (?=(?:%|[mµn]?s|[KMGT]?i?B)(?!\w))", "\u00a0", text)


def _signed(text: str) -> str:
    """A formatted number with a typographic sign in front."""
    return "−" + text[1:] if text.startswith("-") else "+" + text


def _step_row(before: Side, after: Side) -> Row:
    times_us = before.step_median_us, after.step_median_us
    shown = (_step(before, max(times_us)), _step(after, max(times_us)))
    return _row("step", shown, _time_change(*times_us))


def _step(side: Side, like_us: float) -> str:
    median_us = format_us(side.step_median_us, like_us=like_us)
    if side.step_spread_us is None:
        return median_us
    return f"{median_us} (IQR {format_us(side.step_spread_us, like_us=like_us)})"


def _time_row(name: str, comparison: Comparison, value_ns: Callable[[OverlapStats], int]) -> Row:
    before_us, after_us = (ns_to_us(value_ns(side.stats)) for side in (comparison.before, comparison.after))
    like_us = max(before_us, after_us)
    shown = format_us(before_us, like_us=like_us), format_us(after_us, like_us=like_us)
    return _row(name, shown, _time_change(before_us, after_us))


def _time_change(before_us: float, after_us: float) -> str:
    change = _signed(format_us(after_us - before_us, like_us=max(before_us, after_us)))
    return f"{change} ({_signed(percent(100 * (after_us / before_us - 1)))})" if before_us else change


def _hidden_row(comparison: Comparison) -> Row:
    first, second = (side.stats.hidden_fraction for side in (comparison.before, comparison.after))
    shown = percent(None if first is None else 100 * first), percent(None if second is None else 100 * second)
    change = "" if first is None or second is None else _points(100 * (second - first))
    return _row("hidden communication", shown, change, more_is_better=True)


def _peak_row(comparison: Comparison) -> Row:
    budget_bytes = comparison.budget_bytes
    first, second = comparison.before.peak_bytes, comparison.after.peak_bytes
    change = "" if first is None or second is None else _signed(format_bytes(second - first))
    shown = _peak(first, budget_bytes), _peak(second, budget_bytes)
    if budget_bytes is None:
        return _row("peak memory", shown, change)
    row = _row(f"peak (budget {format_bytes(budget_bytes)})", shown, change)
    # Memory inside the budget is there to be used: only a peak above it is bad news.
    if row.tone is Tone.WORSE and (second or 0) <= budget_bytes:
        return replace(row, tone=Tone.SAME)
    return row


def _peak(peak_bytes: int | None, budget_bytes: int | None) -> str:
    if peak_bytes is None:
        return NOT_KNOWN
    if not budget_bytes:
        return format_bytes(peak_bytes)
    return f"{format_bytes(peak_bytes)} ({100 * peak_bytes / budget_bytes:.0f} %)"


def _gap_row(comparison: Comparison, bound_us: float) -> Row:
    first, second = comparison.gap_percent(comparison.before), comparison.gap_percent(comparison.after)
    change = "" if first is None or second is None else _points(second - first)
    return _row(f"gap to bound ({format_us(bound_us)})", (percent(first), percent(second)), change)


def _points(change: float) -> str:
    return f"{_signed(f'{change:.1f}')} points"


def _row(name: str, shown: tuple[str, str], change: str, *, more_is_better: bool = False) -> Row:
    amount = change.split(" (", 1)[0]
    if not any(digit in amount for digit in "123456789"):
        return Row(name, *shown, amount.lstrip("+−"), Tone.SAME)
    grew = change.startswith("+")
    return Row(name, *shown, change, Tone.BETTER if grew is more_is_better else Tone.WORSE)
