"""A plan beside the step that was measured of it: the step, what is exposed, the peak, and each collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.pairing import Pair, off_by, paired
from overlap_pass.schedule.types import Decision
from overlap_pass.timeline.spans import Timeline
from overlap_pass.units import format_bytes, format_us, ns_to_us

__all__ = ["Pair", "Prediction"]


@dataclass(frozen=True)
class Prediction:
    """What was planned for a system, before it was measured.

    Attributes:
        side: the simulated step.
        budget_bytes: bound on its peak, ``None`` for none.
        pairs, unpaired: see :class:`~overlap_pass.report.pairing.Pairing`.
        decisions: the moves behind it.
    """

    side: Side
    budget_bytes: int | None = None
    pairs: tuple[Pair, ...] = ()
    unpaired: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()

    @classmethod
    def beside(cls, plan: Comparison, measured: Timeline | None) -> Prediction:
        """The scheduled side of a plan beside a profiled step, ``None`` where nothing was profiled."""
        side, budget_bytes, decisions = plan.after, plan.budget_bytes, plan.decisions
        if measured is None:
            return cls(side, budget_bytes, decisions=decisions)
        found = paired(side.timeline, measured)
        return cls(side, budget_bytes, found.pairs, found.unpaired, decisions)

    @property
    def step_us(self) -> float:
        return self.side.step_median_us

    def lines(self, step_us: float, measured: Side | None, peak_bytes: int) -> tuple[str, ...]:
        """Predicted against measured, a line each; what was not measured is left out."""
        found = [f"step predicted {_against(self.step_us, step_us)}"]
        if measured is not None:
            for name in ("compute", "exposed"):
                ours, theirs = (getattr(side.stats, f"{name}_ns") for side in (self.side, measured))
                found.append(f"{name} predicted {_against(ns_to_us(ours), ns_to_us(theirs))}")
        if peak_bytes and self.side.peak_bytes is not None:
            found.append(_peak_line(self.side, peak_bytes, self.budget_bytes))
        for kind in sorted({pair.collective for pair in self.pairs}):
            found.append(_kind_line(kind, [pair for pair in self.pairs if pair.collective == kind]))
        return (*found, *(f"not paired: {one}" for one in self.unpaired))

    def to_json(self) -> dict[str, Any]:
        return {
            "step_us": self.step_us,
            "compute_ns": self.side.stats.compute_ns,
            "exposed_ns": self.side.stats.exposed_ns,
            "peak_bytes": self.side.peak_bytes,
            "compiled_peak_bytes": self.side.compiled_peak_bytes,
            "budget_bytes": self.budget_bytes,
            "collectives": [{**asdict(pair), "error_percent": pair.error_percent} for pair in self.pairs],
            "unpaired": list(self.unpaired),
        }


def _peak_line(side: Side, measured_bytes: int, budget_bytes: int | None) -> str:
    """Against what compiled code is expected to take, and what it takes at most, which is what the budget bounds."""
    most_bytes = side.peak_bytes or 0
    expected_bytes = side.compiled_peak_bytes or most_bytes
    error = 100 * (expected_bytes / measured_bytes - 1)
    most = f", at most {format_bytes(most_bytes)}" if expected_bytes != most_bytes else ""
    budget = f", budget {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    return f"peak predicted {format_bytes(expected_bytes)}, measured {format_bytes(measured_bytes)} ({error:+.1f} %){most}{budget}"


def _against(predicted_us: float, measured_us: float) -> str:
    like_us = max(predicted_us, measured_us)
    return f"{format_us(predicted_us, like_us=like_us)}, measured {format_us(measured_us, like_us=like_us)}{off_by(predicted_us, measured_us)}"


def _kind_line(kind: str, pairs: Sequence[Pair]) -> str:
    total = _against(
        ns_to_us(sum(pair.predicted_ns for pair in pairs)), ns_to_us(sum(pair.measured_ns for pair in pairs))
    )
    error = median(abs(pair.error_percent) for pair in pairs)
    shift_us = median(abs(ns_to_us(pair.predicted_start_ns - pair.measured_start_ns)) for pair in pairs)
    return f"{len(pairs)} × {kind} predicted {total}; each off by {error:.0f} % of its time and {format_us(shift_us)} of its place, in the median"
