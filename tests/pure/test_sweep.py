"""Crossovers are read off where they should be, and table, page and JSON say the same."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from overlap_pass.cli.main import main
from overlap_pass.report import strategies_table, sweep_chart, sweep_table
from overlap_pass.report.strategies_table import Row, beside_one_bound
from overlap_pass.report.sweep import Point, Sweep


def sweep_of(*shares: tuple[int, float], world_size: int = 8, refused: tuple[tuple[str, str], ...] = ()) -> Sweep:
    """Steps of 100 µs of which so many percent are exposed, by tokens."""
    points = tuple(
        Point(tokens, world_size, "fsdp2", 200.0, 120.0, 100.0, percent, 2**30, 80.0) for tokens, percent in shares
    )
    return Sweep("model <b>", (("hardware", "h100"),), points, refused)


@pytest.mark.parametrize(
    ("shares", "tokens"),
    [
        (((1000, 9.0), (4000, 1.0)), 2000.0),  # half of the way down is half of the way on the logarithmic scale
        (((1000, 4.0), (4000, 1.0)), 1000.0),  # hidden everywhere
        (((1000, 40.0), (4000, 6.0)), None),  # hidden nowhere
        (((1000, 2.0), (2000, 10.0), (8000, 0.0)), 4000.0),  # exposed again in between
        (((1000, 2.0), (4000, 30.0)), None),
    ],
)
def test_the_crossover_is_where_the_last_fall_passes_the_threshold(shares, tokens) -> None:
    (series,) = sweep_of(*shares).series
    assert series.crossover_tokens == (tokens if tokens is None else pytest.approx(tokens))


def test_points_in_any_order_make_series_by_tokens() -> None:
    sweep = sweep_of((4000, 1.0), (1000, 9.0))
    assert [point.tokens for point in sweep.series[0].points] == [1000, 4000]


def test_the_table_names_crossover_shares_and_refusals() -> None:
    text = sweep_table.render(sweep_of((1000, 9.0), (4000, 1.0), refused=(("8 ranks", "too little memory"),)))
    assert "hidden from about 2000 tokens a rank on" in text
    assert "60.0 %" in text
    assert "25.0 %" in text, "the gap: 100 over 80"
    assert "8 ranks: too little memory" in text


def test_the_page_loads_nothing_and_escapes_names() -> None:
    page = sweep_chart.render(sweep_of((1000, 9.0), (4000, 1.0)))
    assert "model &lt;b&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"https?://|<script|src=|@import|url\(", page)
    assert "prefers-color-scheme: dark" in page
    assert page.count("<circle") == 2
    assert 'class="cross' in page


def test_a_single_point_is_a_chart_too() -> None:
    assert "<circle" in sweep_chart.render(sweep_of((1000, 9.0)))


def test_names_at_the_lines_ends_do_not_overlap() -> None:
    page = sweep_chart.render(sweep_of((1000, 9.0), (4000, 60.0)))
    places = sorted(float(y) for y in re.findall(r'class="name[^"]*" x="[\d.]+" y="([\d.]+)"', page))
    assert len(places) == 2
    assert all(second - first >= 16 for first, second in itertools.pairwise(places))


def test_json_has_every_point_and_crossover() -> None:
    data = json.loads(json.dumps(sweep_of((1000, 9.0), (4000, 1.0)).to_json()))
    assert [point["exposed_percent"] for point in data["points"]] == [9.0, 1.0]
    assert data["crossover"] == [{"world_size": 8, "budget": "fsdp2", "tokens": pytest.approx(2000)}]


def test_a_strategy_that_cannot_plan_says_why_below_the_table() -> None:
    rows = [Row("latest_start", 2030.0, 100.0, 2**30, 2000.0, 0.2), Row("exact", refused="needs OR-tools")]
    text = strategies_table.render("model", rows)
    assert re.search(r"latest_start +2\.0 ms +0\.1 ms +1\.00 GiB +1\.5 % +0\.2 s", text)
    assert "exact: needs OR-tools" in text


def test_gaps_of_strategies_are_to_one_bound() -> None:
    rows = beside_one_bound([Row("a", 200.0, 0.0, 1, 100.0), Row("b", 150.0, 0.0, 1, 120.0), Row("c", refused="no")])
    assert [row.gap_percent for row in rows] == [pytest.approx(100), pytest.approx(50), None]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sweep", "--tokens", "12,x"], "--tokens='12,x' is no list"),
        (["sweep", "--world", "1,8"], "at least 2"),
        (["sweep", "--output", "sweep.pdf"], "must end in .html or .json"),
        (["plan", "--budget", "lots"], "memory_budget='lots'"),
        (["plan", "--tokens", "0"], "--tokens=0"),
        (["plan", "--gpu", "h1000"], "h1000"),
        (["plan", "--output", "no/such/folder/page.html"], "does not exist"),
        (["strategies", "--tokens", "0"], "--tokens=0"),
    ],
)
def test_bad_input_is_refused_in_one_line_before_anything_is_traced(argv, message, capsys) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
