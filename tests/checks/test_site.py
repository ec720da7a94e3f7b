"""The pages build into a site without a warning: every link, anchor, picture and included file is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.checks.sources import ROOT


def test_the_site_builds_without_a_warning(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "site" / "quickstart.zh" / "index.html").exists()
    own = (tmp_path / "site" / "own-strategy" / "index.html").read_text("utf-8")
    assert "overlap_pass.schedule.placement" in own, "the file that the page includes is not in it"


def test_every_strategy_has_a_page_and_every_page_a_place():
    from overlap_pass.registry import registry

    assert {path.stem for path in (ROOT / "docs" / "strategies").glob("*.md")} == set(registry().names)
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f"{page}\n" not in nav} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_whole_and_says_what_it_shows(path):
    assert ElementTree.parse(path).getroot().attrib["aria-label"]
