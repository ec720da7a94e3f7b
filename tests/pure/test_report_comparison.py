"""The record behind every report: its derived figures and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_pass.errors import PlanError
from overlap_pass.report.comparison import SCHEMA, Comparison, Side
from overlap_pass.schedule.types import Action, Decision
from overlap_pass.timeline.spans import Span, SpanKind, Timeline


def side(label: str, gather_ns: int, samples_us: tuple[float, ...] = ()) -> Side:
    spans = (
        Span("mm", SpanKind.COMPUTE, "compute", 0, 60_000),
        Span("gather", SpanKind.COMMUNICATION, "g0", 50_000, 50_000 + gather_ns, "all_gather", 4096, "layers.0"),
    )
    timeline = Timeline(label, 100_000, spans, predicted=not samples_us)
    return Side.of(label, timeline, peak_bytes=2048, step_samples_us=samples_us)


@pytest.fixture
def comparison() -> Comparison:
    return Comparison(
        title="toy",
        verdict="equal",
        before=side("as written", 40_000),
        after=side("scheduled", 10_000, (90.0, 91.0, 92.0, 93.0, 100.0)),
        budget_bytes=4096,
        bound_us=80.0,
        setting=(("hardware", "h100"),),
        decisions=(Decision("gather", Action.HOIST, 3, "hides 10 µs"),),
        notes=("first step left out",),
    )


def test_a_comparison_survives_its_json_as_text(comparison: Comparison) -> None:
    text = json.dumps(comparison.to_json(), allow_nan=False)
    assert Comparison.from_json(json.loads(text)) == comparison


def test_the_json_names_its_schema_and_holds_the_derived_figures(comparison: Comparison) -> None:
    data = comparison.to_json()
    assert data["schema"] == SCHEMA
    assert data["gap_percent"] == {"before": pytest.approx(25.0), "after": pytest.approx(15.0)}
    assert data["before"]["predicted"] is True
    assert data["before"]["stats"]["hidden_fraction"] == pytest.approx(0.25)


def test_a_measured_step_is_the_median_of_its_samples_with_the_interquartile_range(comparison: Comparison) -> None:
    assert comparison.after.step_median_us == 92.0
    assert comparison.after.step_spread_us == 2.0  # 91 to 93


def test_a_step_without_samples_is_as_long_as_its_timeline(comparison: Comparison) -> None:
    assert comparison.before.step_median_us == 100.0
    assert comparison.before.step_spread_us is None
    assert side("one", 1, (5.0,)).step_spread_us is None


def test_without_a_bound_there_is_no_gap(comparison: Comparison) -> None:
    unbounded = Comparison("toy", "equal", comparison.before, comparison.after)
    assert unbounded.gap_percent(unbounded.after) is None


@pytest.mark.parametrize("schema", [None, "overlap-pass/comparison/999"])
def test_another_schema_is_refused_by_name(comparison: Comparison, schema: str | None) -> None:
    with pytest.raises(PlanError, match=SCHEMA):
        Comparison.from_json({**comparison.to_json(), "schema": schema})


@pytest.mark.parametrize("change", [{"before": {}}, {"setting": [["a"]]}, {"before": None}, {"decisions": [{}]}])
def test_a_damaged_report_is_an_error_and_not_a_traceback(comparison: Comparison, change: dict[str, object]) -> None:
    with pytest.raises(PlanError, match="damaged"):
        Comparison.from_json({**comparison.to_json(), **change})


def test_the_page_on_reports_names_every_field_of_the_json(comparison: Comparison) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    data = comparison.to_json()
    side = data["before"]
    parts = (data, side, side["stats"], side["stats"]["per_collective"][0], side["timeline"], data["decisions"][0])
    missing = {name for part in parts for name in part if f"`{name}`" not in text and f'"{name}"' not in text}
    assert not missing
    assert SCHEMA in text
