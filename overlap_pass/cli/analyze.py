"""``overlap-pass analyze``: what any PyTorch trace says about overlap, and what to do about it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_pass.cli.looks import colour, width
from overlap_pass.errors import OptionError, TraceError

if TYPE_CHECKING:
    from overlap_pass.report.analysis import AnalysisReport
    from overlap_pass.traces.capture import Capture
    from overlap_pass.traces.figures import Analysis

__all__ = ["add_parser", "analyze_files", "check_files", "run", "write_file"]

_QUIET_S = 2.0
"""Nothing is said of what takes less."""

_MANY_EVENTS = 50_000
"""Device events that take about that long to analyze."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "analyze",
        help="say what profiler traces tell about overlap, and what to do",
        description=(
            "Read PyTorch profiler traces (.json, .json.gz) of one or many ranks: what is exposed and idle in a step and "
            "why, and what to do about it."
        ),
    )
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="files, globs, or folders of traces of one run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument("--perfetto", type=Path, metavar="FILE", help="write annotations for Perfetto (.json)")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="write a log folder for TensorBoard")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from overlap_pass.report import analysis, analysis_terminal

    check_files(args.html, args.perfetto)
    if args.tensorboard is not None:
        from overlap_pass.report import analysis_tensorboard

        analysis_tensorboard.require()
    report = analysis.AnalysisReport.of(analyze_files(args.traces))
    if args.json:
        sys.stdout.write(analysis.dumps(report))
    else:
        sys.stdout.write(analysis_terminal.render(report, width=width(140), colour=colour()))
    _write(args, report)
    return 0


def check_files(*outputs: Path | None) -> None:
    """Refuse what cannot be written before anything is read."""
    for output in outputs:
        if output is not None and not output.parent.is_dir():
            raise OptionError(f"{output}: there is no folder {output.parent}")
        if output is not None and output.is_dir():
            raise OptionError(f"{output}: is a folder: name a file in it")


def analyze_files(names: Sequence[str]) -> Analysis:
    """The figures of files, globs and folders; files without device events are left out, with a word on stderr.

    Raises:
        TraceError: a name stands for nothing, or no file can be read.
    """
    from overlap_pass.traces.analyse import analyse
    from overlap_pass.traces.files import find_traces

    captures = _read(find_traces(names))
    if sum(len(capture.events) for capture in captures) < _MANY_EVENTS:
        return analyse(captures)
    from overlap_pass.cli.progress import Progress

    with Progress() as progress:
        progress.show("finding causes")
        return analyse(captures)


def _read(paths: Sequence[Path]) -> list[Capture]:
    from overlap_pass.traces.capture import read_trace

    captures: list[Capture] = []
    refused: list[TraceError] = []
    sizes = [path.stat().st_size for path in paths]
    with _progress(sum(sizes)) as show:
        for position, path in enumerate(paths):
            before = sum(sizes[:position])
            try:
                captures.append(read_trace(path, lambda done, _: show(path.name, before + done)))  # noqa: B023  used at once
            except TraceError as error:
                refused.append(error)
    if not captures:
        raise refused[0]
    for reason in refused:
        print(f"overlap-pass: left out: {' '.join(str(reason).split())}", file=sys.stderr)
    return captures


def _write(args: argparse.Namespace, report: AnalysisReport) -> None:
    # What is not asked for is not imported: a small trace is read in less time than all of it takes.
    if args.html is not None:
        from overlap_pass.report import analysis_html

        write_file(args.html, analysis_html.render(report), "open it in a browser")
    if args.perfetto is not None:
        from overlap_pass.report import analysis_perfetto

        write_file(args.perfetto, analysis_perfetto.render(report), "open it in ui.perfetto.dev beside the trace")
    if args.tensorboard is not None:
        from overlap_pass.report import analysis_tensorboard

        analysis_tensorboard.write(report, args.tensorboard)
        print(f"{args.tensorboard}: tensorboard --logdir {args.tensorboard}", file=sys.stderr)
        offline = args.tensorboard / analysis_tensorboard.PAGE
        print(f"{offline}: open it where the profiler plugin has no network for its charts", file=sys.stderr)


def write_file(path: Path, content: str, hint: str) -> None:
    """Writes a page, and says on stderr what to do with it."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path}: cannot be written ({error.strerror or error})") from error
    print(f"{path}: {hint}", file=sys.stderr)


@contextmanager
def _progress(total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Gives what takes the name of a file and the bytes read so far, and says it once two seconds have passed."""
    began = time.monotonic()
    with ExitStack() as open_bar:
        show: Callable[[str, int], None] | None = None

        def when_slow(name: str, done_bytes: int) -> None:
            nonlocal show
            if show is None and time.monotonic() - began >= _QUIET_S:
                from overlap_pass.cli.reading import reading  # most traces are read before rich has been imported

                show = open_bar.enter_context(reading(total_bytes))
            if show is not None:
                show(name, done_bytes)

        yield when_slow
