"""What pages name exists: files, modules, options, commands with their flags, make targets, anchors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from overlap_pass.cli.main import build_parser
from overlap_pass.config import Config
from tests.checks.sources import ROOT, listing

PAGES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
PRODUCT = ("overlap_pass", "compile_backends", "examples", "tests")

# Names of PyTorch, CUDA, transformers and DeepSpeed that pages speak of and no code of ours mentions.
OTHERS = {
    "CTAPolicy",
    "autosp",
    "basicConfig",
    "batched_mm",
    "cuStreamWaitValue32",
    "cuStreamWriteValue32",
    "cudaFree",
    "enable_low_contention_collectives",
    "experts_implementation",
    "grouped_mm",
    "memory_summary",
    "output_router_logits",
    "persistent_workers",
}
# A folder that is made by who first puts a file there, and a group of entry points.
ELSEWHERE = {"tests/data/traces", "overlap_pass.strategies"}
# Names that stand for what a reader would write, and extensions.
STAND_INS = {"FSDPBlock", "OPTIONS", "OverlapBlock", "pickle", "txt", "venv"}


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)


def spans() -> Iterator[tuple[Path, int, str]]:
    """Each `code span` outside of blocks, with where it stands in the page without them."""
    for page in PAGES:
        text = prose(page)
        for match in re.finditer(r"`([^`]+)`", text):
            yield page, text.count("\n", 0, match.start()) + 1, " ".join(match[1].split())


def command_lines() -> Iterator[tuple[Path, int, str]]:
    """Spans, and lines of blocks that a shell would read; a line that goes on is one line."""
    yield from spans()
    for page in PAGES:
        text = page.read_text("utf-8")
        for block in re.finditer(r"^ *```bash\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start(1)) + 1
            yield from ((page, line, command) for command in block[1].replace("\\\n", " ").splitlines())


@cache
def words() -> set[str]:
    """Every word of the code, its page assets and its data files."""
    suffixes = {".py", ".js", ".css", ".html", ".toml"}
    inside = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
    files = [*inside, ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci" / "run"]
    found = {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}
    return found | {part for path in files for part in path.relative_to(ROOT).parts} | {path.stem for path in files}


def test_every_name_in_code_type_is_in_the_code():
    unknown = (
        (page, line, f"{word} in `{span}`")
        for page, line, span in spans()
        for word in re.findall(r"[A-Za-z_]\w{2,}", span)
        if word not in words() | OTHERS | STAND_INS and not (ROOT / span).exists()
    )
    assert listing(unknown) == ""


def test_no_name_is_excused_that_is_in_the_code():
    text = "\n".join(map(prose, PAGES))
    assert {name for name in OTHERS | STAND_INS if name not in text} == set()


def test_every_file_in_code_type_is_there():
    roots = (ROOT, ROOT / "overlap_pass")
    missing = (
        (page, line, f"`{span}`")
        for page, line, span in spans()
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", span) and ("/" in span or span.endswith((".md", ".toml", ".py")))
        if (ROOT / span.partition("/")[0]).exists() or (ROOT / "overlap_pass" / span.partition("/")[0]).exists()
        if span not in ELSEWHERE and not any((root / span).exists() for root in roots)
    )
    assert listing(missing) == ""


def test_every_module_in_code_type_can_be_found():
    missing = (
        (page, line, f"{name} in `{span}`")
        for page, line, span in spans()
        for name in re.findall(r"\b(?:overlap_pass|compile_backends|tests)(?:\.\w+)+", span)
        if name not in ELSEWHERE and not exists(name)
    )
    assert listing(missing) == ""


def exists(name: str) -> bool:
    """A module, or a name that the module in front of the last dot has; modules that need torch are only read."""
    path = ROOT.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    owner = path.parent.with_suffix(".py") if path.parent.with_suffix(".py").is_file() else path.parent / "__init__.py"
    return owner.is_file() and re.search(rf"\b{path.name}\b", owner.read_text("utf-8")) is not None


def test_every_key_of_options_is_an_option():
    options = {field.name for field in fields(Config)}
    unknown = (
        (page, line, f"{name} in `{span}`")
        for page, line, span in spans()
        if span.startswith("options=")
        for name in re.findall(r'"(\w+)":', span)
        if name not in options
    )
    assert listing(unknown) == ""


def flags(parser: argparse.ArgumentParser) -> set[str]:
    return {flag for action in parser._actions for flag in action.option_strings}


def test_every_command_line_would_be_accepted():
    """Its command and flags; values are for the commands' own tests."""
    parser = build_parser()
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    wrong = []
    for page, line, text in command_lines():
        for called in re.findall(r"(?:overlap-pass|-m overlap_pass) (?!COMMAND)([^#|&;)]+)", text):
            name, *given = called.split()
            known = flags(commands[name]) | {"--debug"} if name in commands else flags(parser)
            given = [word.partition("=")[0] for word in given if word.startswith("-")]
            if name not in commands and name not in known:
                wrong.append((page, line, f"no command {name}"))
            wrong += [(page, line, f"{name} has no {flag}") for flag in given if flag not in known]
    assert listing(iter(wrong)) == ""


def test_every_script_takes_the_flags_that_it_is_shown_with():
    wrong = (
        (page, line, f"{script} has no {flag}")
        for page, line, text in command_lines()
        for script, rest in re.findall(r"\b(examples/\w+\.py)(?!:)([^#|&;]*)", text)
        for flag in re.findall(r"(?<!\S)--[a-z-]+", rest)
        if f'"{flag}"' not in (ROOT / script).read_text("utf-8")
    )
    assert listing(wrong) == ""


def test_every_make_target_and_module_that_is_run_is_there():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    wrong = [
        (page, line, f"make {target}")
        for page, line, text in command_lines()
        for target in re.findall(r"^make ([\w-]+)", text)
        if target not in targets
    ]
    wrong += [
        (page, line, f"-m {module}")
        for page, line, text in command_lines()
        for module in re.findall(r"-m (tests\.[\w.]+)", text)
        if not exists(module)
    ]
    assert listing(iter(wrong)) == ""


def anchors(page: Path) -> set[str]:
    """As MkDocs and GitHub make them of headings without other marks than letters, digits, dashes and blanks."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_inside_the_project_leads_to_a_file_and_a_heading(page: Path):
    dead = []
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text("utf-8")):
        other = (page.parent / target) if target else page
        if not other.exists():
            dead.append(target)
        elif anchor and anchor not in anchors(other):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_the_checks_find_what_is_not_there():
    found = ("overlap_pass.schedule.choice", "overlap_pass.report.comparison.Comparison")
    assert [name for name in found if not exists(name)] == []
    assert [name for name in found if exists(name + "s")] == []
