"""What the renderers write for two small comparisons whose figures are worked out in ``comparisons.py``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from overlap_pass.report import html, jsonfile, terminal
from overlap_pass.report.comparison import Comparison
from tests.pure.comparisons import measured, predicted

Golden = Callable[[Path, str], None]
FOLDER = Path(__file__).parent / "golden"


@pytest.fixture(params=[predicted, measured], ids=["predicted", "measured"])
def case(request: pytest.FixtureRequest) -> tuple[str, Comparison]:
    return request.param.__name__, request.param()


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_report_is_as_accepted(case: tuple[str, Comparison], width: int, golden: Golden) -> None:
    name, comparison = case
    golden(FOLDER / f"{name}_{width}.txt", terminal.render(comparison, width=width))


def test_the_json_report_is_as_accepted(case: tuple[str, Comparison], golden: Golden) -> None:
    name, comparison = case
    golden(FOLDER / f"{name}.json", jsonfile.dumps(comparison))


def test_the_markup_of_the_page_is_as_accepted(case: tuple[str, Comparison], golden: Golden) -> None:
    """Without style, scripts and data, which are files of their own or tested as JSON."""
    name, comparison = case
    page = html.render(comparison)
    for element in ("style", "script"):
        page = re.sub(rf"(<{element}[^>]*>).*?(</{element}>)", r"\1\2", page, flags=re.DOTALL)
    golden(FOLDER / f"{name}.html", re.sub(r"'sha256-[^']*'", "'sha256-'", page))
