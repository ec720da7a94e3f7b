"""Pages say what the code does: every option, command and error has its place, every command stands as it is run."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from dataclasses import fields

from overlap_pass import errors
from overlap_pass.cli.main import build_parser
from overlap_pass.config import Config
from overlap_pass.cost.hardware import hardware_names
from overlap_pass.registry import registry
from tests.checks.sources import ROOT

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")


def sections(page: str) -> dict[str, str]:
    """Title → text of each second-level section of a page."""
    title, *parts = re.split(r"^## (.+)$", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE)
    assert title.startswith("# ")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = build_parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def test_every_option_of_the_backend_has_a_section_and_a_row():
    names = {field.name for field in fields(Config)}
    assert set(sections("options.md")) == names
    page = (DOCS / "options.md").read_text("utf-8")
    assert {name for name in names if f"| [`{name}`](#{name}) |" not in page} == set()


def rows_of_options() -> dict[str, tuple[str, str]]:
    """Option → what the table says of its default and of what is accepted."""
    page = (DOCS / "options.md").read_text("utf-8")
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    return {name: (default, accepted) for name, default, accepted in rows}


def test_the_default_on_the_page_of_options_is_the_one_in_force():
    for name, (default, _) in rows_of_options().items():
        if default == "none":
            assert getattr(Config(), name) in (None, ()), name
        else:
            assert Config.from_options({name: ast.literal_eval(default.strip("`"))}) == Config(), name


def test_what_the_page_of_options_says_is_accepted_is_accepted():
    """All of it that is a value to be written, and not a pattern or a description."""
    tried = [
        (name, ast.literal_eval(value))
        for name, (_, accepted) in rows_of_options().items()
        for value in re.findall(r"`([^`]+)`", accepted)
        if value.startswith(('"', "[")) and name != "strategy"
    ]
    assert len(tried) > 25
    for name, value in tried:
        Config.from_options({name: value})


def test_every_option_is_read_by_the_backend():
    """By itself, or through the property of the options that it is part of."""
    through = {"hardware": "hardware_for"} | dict.fromkeys(
        ("coalesce", "launch_order", "communicators_in_flight", "final_places"), "launches"
    )
    read = {
        node.attr
        for path in (ROOT / "compile_backends").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ("config", "_config")
    }
    assert {field.name for field in fields(Config) if through.get(field.name, field.name) not in read} == set()


def test_the_page_of_options_names_every_strategy_and_hardware():
    page = (DOCS / "options.md").read_text("utf-8")
    assert {
        name for name in (*registry().names, *hardware_names()) if f"`{name}`" not in page.replace('"', "")
    } == set()


def test_every_command_has_a_section_that_lists_its_options():
    for name, parser in commands().items():
        text = sections("commands.md")[f"overlap-pass {name}"]
        listed = set(re.findall(r"`(--[a-z-]+)`", text))
        flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
        assert listed == flags - {"--help", "--debug"}, name


def test_every_command_of_the_page_exists():
    assert set(sections("commands.md")) == {f"overlap-pass {name}" for name in commands()}


def test_every_error_has_a_section():
    classes = {
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.OverlapPassError) and value is not errors.OverlapPassError
    }
    assert set(sections("errors.md")) == classes


def test_ci_runs_the_second_command_of_the_readme_as_it_stands_there():
    blocks = re.findall(r"```bash\n(.+?)\n```", README, flags=re.DOTALL)
    demo, tests = (block for block in blocks if "venv" in block)
    assert demo.endswith("overlap-pass demo")
    assert (ROOT / ".ci" / "run").read_text("utf-8").splitlines()[-1] == tests


def test_the_changelog_has_the_version_that_is_installed():
    from overlap_pass import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
