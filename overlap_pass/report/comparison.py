"""Everything a report shows, decided and measured elsewhere; the renderers only spell it.

The JSON form is documented in ``docs/reports.md`` and stable: fields are added, never renamed or given another
meaning, without a new :data:`SCHEMA`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from overlap_pass.errors import PlanError
from overlap_pass.schedule.types import Action, Decision
from overlap_pass.timeline.spans import Timeline
from overlap_pass.timeline.stats import OverlapStats, measure
from overlap_pass.units import ns_to_us

__all__ = ["SCHEMA", "Comparison", "Side"]

SCHEMA = "overlap-pass/comparison/1"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, or plans, that are compared.

    Attributes:
        label: what the reader calls it: ``"as written"``, ``"scheduled"``.
        timeline: one representative step, for drawing.
        stats: its overlap figures.
        peak_bytes: peak memory of the step, ``None`` where not known; of a prediction what compiled code takes at most.
        step_samples_us: durations of unprofiled steps; empty for a prediction. Profiling slows a step down, so a
            verdict on speed is taken from these and not from the timeline.
    """

    label: str
    timeline: Timeline
    stats: OverlapStats
    peak_bytes: int | None = None
    step_samples_us: tuple[float, ...] = ()
    compiled_peak_bytes: int | None = None

    @classmethod
    def of(
        cls,
        label: str,
        timeline: Timeline,
        *,
        peak_bytes: int | None = None,
        step_samples_us: tuple[float, ...] = (),
        compiled_peak_bytes: int | None = None,
    ) -> Side:
        """A side with the figures of its timeline."""
        return cls(label, timeline, measure(timeline), peak_bytes, step_samples_us, compiled_peak_bytes)

    @property
    def predicted(self) -> bool:
        """From the simulator rather than from a run."""
        return self.timeline.predicted

    @property
    def step_median_us(self) -> float:
        """Median of the unprofiled steps; without them the length of the timeline."""
        return median(self.step_samples_us) if self.step_samples_us else ns_to_us(self.stats.step_ns)

    @property
    def step_spread_us(self) -> float | None:
        """Interquartile range of the unprofiled steps; ``None`` with fewer than two."""
        if len(self.step_samples_us) < 2:
            return None
        first, _, third = quantiles(self.step_samples_us, n=4, method="inclusive")
        return third - first

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "predicted": self.predicted,
            "step_median_us": self.step_median_us,
            "step_spread_us": self.step_spread_us,
            "step_samples_us": list(self.step_samples_us),
            "peak_bytes": self.peak_bytes,
            "compiled_peak_bytes": self.compiled_peak_bytes,
            "stats": self.stats.to_json(),
            "timeline": self.timeline.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Side:
        return cls(
            label=data["label"],
            timeline=Timeline.from_json(data["timeline"]),
            stats=OverlapStats.from_json(data["stats"]),
            peak_bytes=data["peak_bytes"],
            step_samples_us=tuple(data["step_samples_us"]),
            compiled_peak_bytes=data.get("compiled_peak_bytes"),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Before and after, and what to think of it.

    Attributes:
        title: what was compared: ``"Llama 8B, 8 × H100"``.
        verdict: one sentence: better, worse or the same, by how much, and what to do.
        before, after: the two sides, on the same rank.
        budget_bytes: what the peak of ``after`` may be, ``None`` for no bound.
        bound_us: no schedule of this graph can be shorter than this, ``None`` where not known.
        setting: (name, value) pairs that say how it was obtained: hardware, world, model, strategy, versions,
            command, date.
        decisions: the moves and refusals behind ``after``.
        notes: what the figures do not cover, one sentence each.
    """

    title: str
    verdict: str
    before: Side
    after: Side
    budget_bytes: int | None = None
    bound_us: float | None = None
    setting: tuple[tuple[str, str], ...] = ()
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()

    def gap_percent(self, side: Side) -> float | None:
        """How much longer a side's step is than the bound; ``None`` without a bound."""
        return 100.0 * (side.step_median_us / self.bound_us - 1.0) if self.bound_us else None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "title": self.title,
            "verdict": self.verdict,
            "budget_bytes": self.budget_bytes,
            "bound_us": self.bound_us,
            "gap_percent": {"before": self.gap_percent(self.before), "after": self.gap_percent(self.after)},
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "setting": [list(pair) for pair in self.setting],
            "decisions": [{**asdict(decision), "action": decision.action.value} for decision in self.decisions],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Comparison:
        """Read what :meth:`to_json` wrote; derived figures are computed anew.

        Raises:
            PlanError: another schema, a missing field or a field of the wrong form.
        """
        found = data.get("schema")
        if found != SCHEMA:
            raise PlanError(f"a report with schema {found!r} cannot be read: this version reads {SCHEMA!r}")
        try:
            return cls(
                title=data["title"],
                verdict=data["verdict"],
                before=Side.from_json(data["before"]),
                after=Side.from_json(data["after"]),
                budget_bytes=data["budget_bytes"],
                bound_us=data["bound_us"],
                setting=tuple((name, value) for name, value in data["setting"]),
                decisions=tuple(Decision(**{**row, "action": Action(row["action"])}) for row in data["decisions"]),
                notes=tuple(data["notes"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"the report is damaged: {type(error).__name__}: {error}") from error
