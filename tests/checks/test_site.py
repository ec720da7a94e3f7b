"""The pages build into a site without a warning: every link, anchor, picture and included file is there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.checks.sources import ROOT
from tests.pure.test_pages_in_browser import in_browser
from tests.pure.test_pages_laid_out import searched


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


def test_the_site_builds_without_a_warning_and_includes_what_it_should(site):
    assert (site / "quickstart.zh.html").exists()
    own = (site / "own-strategy.html").read_text("utf-8")
    assert "overlap_pass.schedule.placement" in own, "the file that the page includes is not in it"


def test_the_site_asks_no_other_host_for_anything(site):
    foreign = re.compile(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="?https?://')
    assert [page.name for page in site.rglob("*.html") if foreign.search(page.read_text("utf-8"))] == []


@in_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "quickstart", "commands", "examples"])
def test_all_text_of_the_site_can_be_read(site, name, theme):
    page = (site / f"{name}.html").read_text("utf-8")
    if theme == "dark":  # the theme's script would choose it, after the search has run
        page = page.replace('data-md-color-scheme="default"', 'data-md-color-scheme="slate"')
    found = searched(site, page, theme, where=".md-content")
    assert (found["faint"], found["wider"]) == ([], 0)


def test_every_strategy_has_a_page_and_every_page_a_place():
    from overlap_pass.registry import registry

    assert {path.stem for path in (ROOT / "docs" / "strategies").glob("*.md")} == set(registry().names)
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f"{page}\n" not in nav} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_whole_and_says_what_it_shows(path):
    assert ElementTree.parse(path).getroot().attrib["aria-label"]
