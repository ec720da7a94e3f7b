"""Names are anybody's: on every page, in every table, picture and file they are text and nothing else.

Each report is made twice, of harmless names and of names that try to be markup, and what is no text must be the same in both.
"""

from __future__ import annotations

import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.write import to_toml
from overlap_pass.report import (
    analysis_html,
    analysis_perfetto,
    analysis_tensorboard,
    analysis_terminal,
    html,
    jsonfile,
    picture,
    strategies_table,
    sweep_chart,
    sweep_table,
    terminal,
    verification_text,
)
from overlap_pass.report.analysis import AnalysisReport, dumps
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.strategies_table import Row
from overlap_pass.report.sweep import Point, Sweep
from overlap_pass.report.verification import LeftOut, Verification
from overlap_pass.schedule.types import Action, Decision
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import read_trace
from tests.pure.drawn_traces import GEMM, NCCL, Trace
from tests.pure.test_report_renderers import Page
from tests.pure.test_verification import measured, ours

PLAIN = "name"
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\"' onmouseover='alert(1)",
    "<!-- --> <!--slot:data--> ]]>",
    "[bold red]a[/] [link=x]",
    "a | b **c** _d_ `e` [f](javascript:g)",
    "\x1b[2J\x1b]0;title\x07 \x9b31m \r \x00",
)


def comparison(name: str) -> Comparison:
    gather = Span(name, SpanKind.COMMUNICATION, name, 0, 1000, name, 1, name)
    side = Side.of(name, Timeline(name, 1000, (gather, Span(name, SpanKind.COMPUTE, "c", 0, 500)), predicted=True))
    decisions = (Decision(name, Action.KEEP, 0, name),)
    return Comparison(name, name, side, side, setting=((name, name),), decisions=decisions, notes=(name,))


def sweep(name: str) -> Sweep:
    points = [Point(tokens, 8, name, 200.0, 120.0, 100.0, share, 2**30, 80.0) for tokens, share in ((1, 9.0), (9, 1.0))]
    return Sweep(name, ((name, name),), tuple(points), ((name, name),))


def verification(name: str) -> Verification:
    systems = (measured(name, 110, 111), replace(ours(99, 100), name=name))
    return Verification(name, systems, setting=((name, name),), left_out=(LeftOut(name, name),), warnings=(name,))


def analysis(name: str, folder: Path) -> AnalysisReport:
    """Kernels, a collective, an annotation that names the module, a step and a file of that name."""
    trace = Trace().cpu(f"FSDP::all_gather ({name})", 0, 3, cat="user_annotation")
    trace.cpu(f"ProfilerStep#1 {name}", 0, 200, cat="user_annotation")
    trace.kernel(GEMM + name, 0, 5, 55).kernel(NCCL + name, 1, 45, 115).kernel(GEMM, 2, 115, 165)
    file = folder / (re.sub(r"[/\x00]", "", name) + ".json")
    return AnalysisReport.of(analyse([read_trace(trace.write(file))]))


PAGES: dict[str, Callable[[str, Path], str]] = {
    "plan, compare, verify, demo": lambda name, _: html.render(comparison(name)),
    "analyze": lambda name, folder: analysis_html.render(analysis(name, folder)),
    "sweep": lambda name, _: sweep_chart.render(sweep(name)),
}
TERMINAL: dict[str, Callable[[str, Path], str]] = {
    "plan, compare, demo": lambda name, _: terminal.render(comparison(name), colour=False),
    "analyze": lambda name, folder: analysis_terminal.render(analysis(name, folder)),
    "sweep": lambda name, _: sweep_table.render(sweep(name)),
    "strategies": lambda name, _: strategies_table.render(name, [Row(name, refused=name), Row(name, 1.0, 1.0, 1, 1.0)]),
    "verify": lambda name, _: verification_text.render(verification(name)),
}


def skeleton(text: str) -> list[str]:
    """The elements of a page, and the names of attributes."""
    page = Page(text)
    return [*page.elements, *(name for name, _ in page.attributes)]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_hostile_names_has_the_elements_of_one_with_harmless_names(
    page: str, name: str, tmp_path: Path
) -> None:
    assert skeleton(PAGES[page](name, tmp_path)) == skeleton(PAGES[page](PLAIN, tmp_path))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("table", TERMINAL)
def test_the_terminal_gets_no_control_character_and_no_markup(table: str, name: str, tmp_path: Path) -> None:
    text = TERMINAL[table](name, tmp_path)
    assert [character for character in text if ord(character) < 32 and character != "\n"] == []
    assert not any(0x7F <= ord(character) < 0xA0 for character in text)
    if name.startswith("[bold"):
        assert "[bold red]a" in text


def test_colours_are_kept_where_they_are_asked_for() -> None:
    text = terminal.render(comparison("\x1b[2J"), colour=True)
    assert "\x1b[1m" in text
    assert "\x1b[2J" not in text


@pytest.mark.parametrize("name", [name for name in HOSTILE if "\x00" not in name])  # XML cannot say a NUL at all
def test_a_picture_stays_well_formed(name: str) -> None:
    step = Timeline(name, 1000, (Span(name, SpanKind.COMPUTE, name, 0, 1000),), predicted=True)
    svg = ElementTree.fromstring(picture.render([(name, step)], alt=name))
    assert {element.tag.rpartition("}")[2] for element in svg.iter()} <= {
        "svg", "title", "style", "defs", "pattern", "rect", "path", "text"
    }  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_files_for_other_programs_hold_the_name_as_it_is(name: str, tmp_path: Path) -> None:
    report = analysis(name, tmp_path)
    assert json.loads(dumps(report))
    assert json.loads(analysis_perfetto.render(report))["traceEvents"]
    assert jsonfile.loads(jsonfile.dumps(comparison(name))) == comparison(name)


@pytest.mark.parametrize("name", HOSTILE)
def test_the_text_for_tensorboard_is_neither_html_nor_markdown(name: str, tmp_path: Path) -> None:
    lines, plain = (analysis_tensorboard.page(analysis(n, tmp_path)).splitlines() for n in (name, PLAIN))
    assert len(lines) == len(plain)
    assert not any("<" in line for line in lines)
    unescaped = re.compile(r"(?<!\\)\|")
    assert [len(unescaped.findall(line)) for line in lines] == [len(unescaped.findall(line)) for line in plain]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hardware_file_reads_back_under_its_name(name: str) -> None:
    assert tomllib.loads(to_toml(replace(load_hardware("h100"), name=name), heading="a"))["name"] == name


@pytest.mark.parametrize("rank", ["../../evil", "<b>", "7", 1.5, None, [], {}])
def test_a_rank_that_is_no_number_is_no_rank(rank: object, tmp_path: Path) -> None:
    """Ranks name files in a log folder."""
    path = Trace().kernel(GEMM, 0, 5, 55).write(tmp_path / "trace.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "distributedInfo": {"rank": rank, "world_size": 2}}))
    assert read_trace(path).rank is None
