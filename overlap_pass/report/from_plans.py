"""The comparison of a step as written with the step as planned, from the plans of its graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

from overlap_pass.errors import OptionError
from overlap_pass.planning import Plan
from overlap_pass.report import html, jsonfile
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.timeline.concatenate import concatenate
from overlap_pass.timeline.spans import Timeline
from overlap_pass.units import format_us

__all__ = ["compare_plans", "write"]


def compare_plans(
    plans: Sequence[Plan], *, title: str = "Predicted step", setting: tuple[tuple[str, str], ...] = ()
) -> Comparison:
    """One step out of the plans of its graphs in the order they run (forward, then backward).

    The peak is the highest of the graphs', the bound the sum of theirs: graphs run one after the other and nothing
    moves between them.
    """
    before = Side.of(
        "as written",
        _joined([plan.before.timeline for plan in plans], "as written"),
        peak_bytes=max(plan.memory_before.peak_bytes for plan in plans),
    )
    after = Side.of(
        "scheduled",
        _joined([plan.after.timeline for plan in plans], "scheduled"),
        peak_bytes=max(plan.memory_after.peak_bytes for plan in plans),
        compiled_peak_bytes=max(plan.compiled_peak_bytes for plan in plans),
    )
    budgets = [plan.budget_bytes for plan in plans if plan.budget_bytes is not None]
    return Comparison(
        title=title,
        verdict=_verdict(before, after),
        before=before,
        after=after,
        budget_bytes=max(budgets) if len(budgets) == len(plans) else None,
        bound_us=sum(plan.bound.step_us for plan in plans),
        setting=setting,
        decisions=tuple(decision for plan in plans for decision in plan.schedule.decisions),
        notes=tuple(f"{plan.program.name}: {note}" for plan in plans for note in _notes(plan)),
    )


def _notes(plan: Plan) -> tuple[str, ...]:
    return (*plan.notes, *(across.summary() for across in (plan.ahead, plan.late) if across is not None))


def write(comparison: Comparison, path: Path) -> None:
    """Write a report; the suffix says which: ``.html`` or ``.json``.

    Raises:
        OptionError: another suffix.
        OSError: the file cannot be written.
    """
    if path.suffix == ".json":
        path.write_text(jsonfile.dumps(comparison), encoding="utf-8")
    elif path.suffix == ".html":
        path.write_text(html.render(comparison), encoding="utf-8")
    else:
        raise OptionError(f"report={str(path)!r} must end in .html or .json")


def _joined(timelines: Sequence[Timeline], label: str) -> Timeline:
    return reduce(lambda first, second: concatenate(first, second, label), timelines)


def _verdict(before: Side, after: Side) -> str:
    saved_us = before.step_median_us - after.step_median_us
    if saved_us <= 0:
        return "No order is predicted to be faster than the one as written."
    share = 100 * saved_us / before.step_median_us
    return f"Predicted {share:.1f} % faster: {format_us(before.step_median_us)} → {format_us(after.step_median_us)} a step."
