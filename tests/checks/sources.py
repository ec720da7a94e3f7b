"""The files that the checks look at, and how a check reports: one ``path:line: what`` for each finding."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "code_files", "listing", "parsed", "project", "text_files"]

ROOT = Path(__file__).parents[2]
_CODE_FOLDERS = ("overlap_pass", "compile_backends", "docs", "examples", "tests")
_TEXT_SUFFIXES = {".css", ".html", ".js", ".json", ".md", ".py", ".toml", ".txt"}
_TEXT_FOLDERS = (*_CODE_FOLDERS, ".ci")


@cache
def code_files() -> tuple[Path, ...]:
    """Every Python file of the project."""
    return tuple(sorted(path for folder in _CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")))


@cache
def text_files() -> tuple[Path, ...]:
    """Every file that a person may read: code, pages, settings, scripts."""
    inside = (path for folder in _TEXT_FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [path for path in (*inside, *ROOT.iterdir()) if path.is_file()]
    return tuple(sorted(path for path in files if path.suffix in _TEXT_SUFFIXES or path.parent.name == ".ci"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), filename=str(path))


@cache
def project() -> dict[str, Any]:
    """``pyproject.toml``."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def listing(findings: Iterator[tuple[Path, int, str]]) -> str:
    """The findings, one a line; empty when there are none."""
    return "\n".join(f"{path.relative_to(ROOT)}:{line}: {what}" for path, line, what in findings)
