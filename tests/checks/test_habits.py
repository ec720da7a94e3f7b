"""Habits that no linter knows: names of files, swallowed errors, traces of somebody's own machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.checks.sources import ROOT, code_files, listing, parsed, text_files

NAMELESS = {"common", "helpers", "misc", "util", "utils"}
PACKAGES = ("overlap_pass", "compile_backends")

OUT_OF_PLACE = {
    "a path of one machine": re.compile(r"(?<![\w.])/(?:work|home|root|Users|mnt|scratch|farm)/\w"),
    "an address of a package index": re.compile(r"pypi\.org|pythonhosted|download\.pytorch|index-url|find-links"),
    "a to-do without an issue number": re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))"),
    "a forgotten breakpoint": re.compile(r"\bbreakpoint\(\)|\bset_trace\(\)"),
    "a conflict marker": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}


def test_no_file_has_a_name_that_says_nothing():
    nameless = ((path, 1, "say what is in it") for path in code_files() if path.stem in NAMELESS)
    assert listing(nameless) == ""


def test_no_error_is_caught_and_forgotten():
    forgotten = (
        (path, node.lineno, "catches everything and does nothing")
        for path in code_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ExceptHandler) and _is_wide(node) and _does_nothing(node)
    )
    assert listing(forgotten) == ""


def _is_wide(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in {"Exception", "BaseException"}


def _does_nothing(handler: ast.ExceptHandler) -> bool:
    return all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)


def test_no_user_input_is_checked_by_assert():
    """``python -O`` drops asserts; in the packages every check is an error from ``overlap_pass.errors``."""
    asserted = (
        (path, node.lineno, "assert in a package")
        for path in code_files()
        if path.relative_to(ROOT).parts[0] in PACKAGES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert)
    )
    assert listing(asserted) == ""


def test_every_module_says_what_it_is():
    silent = (
        (path, 1, "no docstring")
        for path in code_files()
        if path.read_text("utf-8").strip() and ast.get_docstring(parsed(path)) is None
    )
    assert listing(silent) == ""


def test_nothing_out_of_place_stands_in_any_file():
    assert listing(out_of_place()) == ""


def out_of_place() -> Iterator[tuple[Path, int, str]]:
    for path in text_files():
        if path == Path(__file__):
            continue
        text = path.read_text("utf-8")
        for what, pattern in OUT_OF_PLACE.items():
            for match in pattern.finditer(text):
                yield path, text.count("\n", 0, match.start()) + 1, f"{what}: {match[0]!r}"
