"""``overlap-pass completion``: a script that lets a shell complete commands, options and files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from overlap_pass.errors import EnvironmentRefused

__all__ = ["add_parser", "run"]

SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"traces", "before", "after", "from_trace"}
"""Arguments that name files without being of type ``Path``, as globs and folders are allowed too."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a script for shell completion",
        description=(
            'Print a script that completes commands, options and files. bash: eval "$(overlap-pass completion bash)"; '
            "zsh: overlap-pass completion zsh > a file _overlap-pass in a folder of $fpath."
        ),
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise EnvironmentRefused(
            "shell completion needs the package shtab: pip install 'overlap-pass[completion]'"
        ) from error
    from overlap_pass.cli.main import build_parser

    parser = build_parser()
    for action in _actions(parser):
        if action.type is Path or action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    sys.stdout.write(shtab.complete(parser, shell=args.shell) + "\n")
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
