"""``overlap-pass compare``: traces before and after a change, and whether the step became shorter."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_pass.cli.looks import colour, width

if TYPE_CHECKING:
    from overlap_pass.report.analysis_difference import Difference

__all__ = ["add_parser", "run"]

_MOST_JOINED = 5


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare profiler traces before and after a change",
        description="Compare two traces, or two folders with those of all ranks: improved, worse, within noise, or not comparable.",
    )
    parser.add_argument("before", metavar="BEFORE", help="file, glob or folder")
    parser.add_argument("after", metavar="AFTER", help="file, glob or folder")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with both timelines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from overlap_pass.cli.analyze import analyze_files, check_files, write_file
    from overlap_pass.report import html, terminal
    from overlap_pass.report.analysis_difference import difference

    check_files(args.html)
    found = difference(analyze_files([args.before]), analyze_files([args.after]))
    if args.json:
        print(json.dumps(found.to_json(), indent=1, allow_nan=False, ensure_ascii=False))
    else:
        sys.stdout.write(terminal.render(found.comparison, width=width(140), colour=colour()))
        _print_joined(found)
    if args.html is not None:
        write_file(args.html, html.render(found.comparison), "open it in a browser")
    return 0


def _print_joined(found: Difference) -> None:
    from overlap_pass.report.table import time_ns

    changed = [row for row in found.joined if row.exposed_before_ns != row.exposed_after_ns][:_MOST_JOINED]
    if changed:
        print("\nExposed time that changed most, of collectives joined by kind, module and size")
    for row in changed:
        name = f"{row.collective} {row.unit or ''}".rstrip()
        print(f"  {name}: {time_ns(row.exposed_before_ns)} → {time_ns(row.exposed_after_ns)}")
