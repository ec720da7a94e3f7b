"""The command line: one module per command, one place for errors and exit codes.

A command is a module of this package with ``add_parser(subparsers)`` and ``run(args) -> int``. Its heavy imports
stand inside ``run``, so ``--help`` and ``doctor`` answer at once and without torch.

Exit codes: 0 done; 1 the command's answer is no (``doctor`` found something missing) or an unexpected error; 2 bad
input or an unfit environment, said in one line; 130 interrupted; 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from overlap_pass import __version__
from overlap_pass.cli import analyze, calibrate, compare, completion, demo, doctor, plan, strategies, sweep, verify
from overlap_pass.errors import OverlapPassError

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS = (analyze, calibrate, compare, completion, demo, doctor, plan, strategies, sweep, verify)

EXIT_UNEXPECTED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """argparse prints the whole usage with every error; here an error is one line, like all others."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"overlap-pass: error: {message} (see {self.prog} --help)\n")


class _Help(argparse.HelpFormatter):
    """Leaves room for the names of commands, whose indentation argparse forgets where it measures them."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment


def build_parser() -> argparse.ArgumentParser:
    """The parser with every command in it."""
    parser = _Parser(
        prog="overlap-pass",
        formatter_class=_Help,
        description="Overlap FSDP collectives with compute: see what it would give, prove it, use it.",
        epilog=(
            "Results go to stdout, progress and errors to stderr. Exit codes: 0 done; 1 the answer is no, or an unexpected "
            "error; 2 bad input or an unfit environment; 130 interrupted; 141 the reader of the output went away."
        ),
    )
    parser.add_argument("--version", action="version", version=f"overlap-pass {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    for command in commands.choices.values():
        # Accepted behind the command too, where people add it after an error; absent, the first one's value stays.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code and lets nothing but ``SystemExit`` of the parser through."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        # argparse would point to the help of all commands, which does not list the options of this one.
        parser.exit(
            EXIT_REFUSED,
            f"overlap-pass: error: {' '.join(unknown)} is not known (see overlap-pass {args.command} --help)\n",
        )
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Python flushes stdout once more at exit, which would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("overlap-pass: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last resort: report it, never swallow it
        return _report(error, debug=args.debug)


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, OverlapPassError):
        print(f"overlap-pass: error: {_one_line(error)}", file=sys.stderr)
        return EXIT_REFUSED
    if isinstance(error, ModuleNotFoundError):
        print(f"overlap-pass: error: {_one_line(error)}; `overlap-pass doctor` says what to install", file=sys.stderr)
        return EXIT_REFUSED
    hint = "" if debug else " (run again with --debug for the traceback)"
    print(f"overlap-pass: unexpected {type(error).__name__}: {_one_line(error)}{hint}", file=sys.stderr)
    return EXIT_UNEXPECTED


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
