"""Formatting, lint, types and the order of imports: ``pytest`` alone runs every tool as it is configured."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.checks.sources import ROOT

TOOLS = {
    "ruff check": ("ruff", ["-m", "ruff", "check", "."]),
    "ruff format": ("ruff", ["-m", "ruff", "format", "--check", "."]),
    "mypy": ("mypy", ["-m", "mypy"]),
    "lint-imports": (
        "importlinter",
        ["-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
    ),
}


@pytest.mark.parametrize("name", TOOLS)
def test_is_content(name):
    module, arguments = TOOLS[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{name} is not installed: pip install -e '.[dev]'")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, f"{name}:\n{done.stdout}{done.stderr}"
