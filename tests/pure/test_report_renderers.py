"""Promises of the renderers beyond the golden files: figures, colours, hostile names, self-contained pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from overlap_pass.errors import PlanError
from overlap_pass.report import html, jsonfile, terminal
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.table import Row, Tone, rows, units_kept
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from tests.pure.comparisons import hostile, measured, predicted

ALL = pytest.mark.parametrize(
    "comparison", [predicted(), measured(), hostile()], ids=["predicted", "measured", "hostile"]
)


def row(comparison: Comparison, name: str) -> Row:
    (found,) = (row for row in rows(comparison) if row.name.startswith(name))
    return found


# -- the table --------------------------------------------------------------------------------------------------------


def test_values_side_by_side_share_a_unit() -> None:
    assert row(predicted(), "exposed") == Row(
        "exposed communication", "1.1 ms", "0.7 ms", "−0.4 ms (−36.4 %)", Tone.BETTER
    )


def test_more_hidden_communication_is_better_and_more_of_anything_else_worse() -> None:
    assert row(predicted(), "hidden").tone is Tone.BETTER
    assert row(measured(), "hidden").tone is Tone.WORSE
    assert row(measured(), "compute").tone is Tone.WORSE
    assert row(measured(), "idle").tone is Tone.BETTER


def test_a_row_that_shows_no_difference_judges_none() -> None:
    assert row(predicted(), "compute") == Row("compute", "1.2 ms", "1.2 ms", "0.0 ms", Tone.SAME)


def test_a_larger_peak_is_bad_news_only_above_the_budget() -> None:
    assert row(predicted(), "peak") == Row(
        "peak (budget 512 MiB)", "256 MiB (50 %)", "320 MiB (62 %)", "+64.0 MiB", Tone.SAME
    )
    assert row(measured(), "peak").tone is Tone.WORSE
    assert row(replace(predicted(), budget_bytes=None), "peak").tone is Tone.WORSE


def test_the_step_is_judged_by_unprofiled_runs_and_the_profiled_one_stands_beside_it() -> None:
    comparison = measured()
    slow_profile = replace(comparison, after=replace(comparison.after, step_samples_us=(70.0, 70.0)))
    steps = [found for found in rows(slow_profile) if found.name.startswith("step")]
    assert [(found.name, found.change) for found in steps] == [
        ("step", "−10.0 µs (−12.5 %)"),
        ("step, profiled", "+10.0 µs (+12.5 %)"),
    ]


def test_what_is_not_known_is_a_dash_and_not_a_zero() -> None:
    empty = Side.of("empty", Timeline("empty", 1000, (), predicted=True))
    comparison = Comparison("nothing", "nothing ran", empty, empty)
    assert row(comparison, "hidden") == Row("hidden communication", "–", "–", "", Tone.SAME)
    assert not any(found.name.startswith(("gap", "peak")) for found in rows(comparison))
    known = replace(comparison, after=replace(empty, peak_bytes=1 << 30))
    assert row(known, "peak") == Row("peak memory", "–", "1.00 GiB", "", Tone.SAME)


# -- the terminal -----------------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_width_and_carry_no_escape_codes(comparison: Comparison, width: int) -> None:
    text = terminal.render(comparison, width=width)
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= width


def test_colours_come_only_when_asked_for_and_change_no_word() -> None:
    coloured = terminal.render(predicted(), colour=True)
    assert "\x1b[32m" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    words = [line.split() for line in plain.splitlines()]
    assert words == [line.split() for line in terminal.render(predicted()).splitlines()]


def test_brackets_in_names_are_no_markup() -> None:
    text = terminal.render(hostile(), width=120)
    for name in ("<title>[link]", "[/red]", "<u>[bold]side", "[red]g0", "<b>all_gather"):
        assert name in text


def test_a_schedule_that_hides_everything_says_so() -> None:
    compute = Span("mm", SpanKind.COMPUTE, "compute", 0, 1000)
    gather = Span("gather", SpanKind.COMMUNICATION, "g0", 0, 500)
    side = Side.of("scheduled", Timeline("scheduled", 1000, (compute, gather), predicted=True))
    comparison = Comparison("toy", "fine", side, side)
    assert "No collective is exposed in scheduled." in terminal.render(comparison)
    assert "No collective is exposed." in html.render(comparison)


def test_the_end_of_a_long_module_name_is_kept() -> None:
    deep = "model." + "wrapper." * 20 + "layers.17"
    gather = Span("gather", SpanKind.COMMUNICATION, "g0", 0, 500, unit=deep)
    side = Side.of("side", Timeline("side", 1000, (gather,), predicted=True))
    assert "layers.17 " in terminal.render(Comparison("toy", "fine", side, side), width=80)


# -- the file ---------------------------------------------------------------------------------------------------------


@ALL
def test_a_report_file_reads_back_as_what_was_written(comparison: Comparison) -> None:
    assert jsonfile.loads(jsonfile.dumps(comparison)) == comparison


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_json_cannot_say_is_an_error_that_names_it(value: float) -> None:
    broken = replace(predicted(), bound_us=value)
    with pytest.raises(PlanError, match=r"comparison\.bound_us"):
        jsonfile.dumps(broken)
    with pytest.raises(PlanError, match=r"comparison\.bound_us"):
        html.render(broken)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": NaN}', '{"schema": 1}'])
def test_a_file_that_is_no_report_is_an_error(text: str) -> None:
    with pytest.raises(PlanError, match="report"):
        jsonfile.loads(text)


# -- the page ---------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a browser would see: elements, attributes, the text outside scripts, and the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.elements[-1:] == ["script"]:
            self.scripts[-1] += data
        else:
            self.words += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self.elements.append("")


@ALL
def test_the_page_asks_nobody_for_anything(comparison: Comparison) -> None:
    text = html.render(comparison)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "base", "form"} & set(page.elements)
    assert not {"src", "href", "srcset", "action"} & {name for name, _ in page.attributes}
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text


@ALL
def test_the_pages_policy_allows_its_one_script_and_no_other(comparison: Comparison) -> None:
    page = Page(html.render(comparison))
    data, exposed, script = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(value for _, value in page.attributes if "script-src" in value)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert jsonfile.loads(data) == comparison
    assert set(json.loads(exposed)) == {"before", "after"}


def test_no_name_becomes_markup() -> None:
    harmless, page = Page(html.render(predicted())), Page(html.render(hostile()))
    assert set(page.elements) <= set(harmless.elements)
    assert len(page.scripts) == 3
    assert not any(name.startswith("on") for name, _ in page.attributes)
    for name in ("<img src=x onerror=alert(1)>", "<u>[bold]side", "model.<script>\u2028&amp;", "\"'><script>"):
        assert name in page.words
    assert "<!-- --> <!--slot:script-->" in page.words


def test_exposed_stretches_reach_the_page_as_they_were_measured() -> None:
    _, exposed, _ = Page(html.render(predicted())).scripts
    assert json.loads(exposed) == {
        "before": [[0, 400_000], [1_000_000, 1_400_000], [2_000_000, 2_300_000]],
        "after": [[0, 400_000], [1_600_000, 1_900_000]],
    }


def test_bars_share_one_scale_and_their_parts_fill_the_step() -> None:
    """Before is 2300 µs, the scale; after 1900 µs: 82.6 % of it."""
    text = html.render(predicted())
    before, after = (
        [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
        for bar in re.findall(r'<div class="bar">(.*?)</div>', text)
    )
    assert sum(before) == pytest.approx(100, abs=0.01)
    assert sum(after) == pytest.approx(100 * 1900 / 2300, abs=0.01)
    assert f"left:{100 * 1600 / 2300:.3f}%" in text


def test_a_line_of_a_page_does_not_end_between_a_number_and_its_unit() -> None:
    kept = units_kept("rank 1, step 3: 19.1 % idle, 4 ms, 2 steps, 3.5 GiB, 7 blocks")
    assert kept == "rank 1, step 3: 19.1\u00a0% idle, 4\u00a0ms, 2 steps, 3.5\u00a0GiB, 7 blocks"
