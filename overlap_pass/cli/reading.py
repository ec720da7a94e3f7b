"""How far files have been read: a bar on a terminal, a line every two seconds elsewhere, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["reading"]

_LINE_EVERY_S = 2.0


@contextmanager
def reading(total_bytes: int) -> Iterator[Callable[[str, int], None]]:
    """Gives what is to be called with the name of the file at hand and the bytes read so far, of all files."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _lines(console, total_bytes)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("reading", total=total_bytes)
        yield lambda name, done_bytes: bar.update(task, description=f"reading {name}", completed=done_bytes)


def _lines(console: Console, total_bytes: int) -> Callable[[str, int], None]:
    said = float("-inf")

    def show(name: str, done_bytes: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _LINE_EVERY_S:
            said = time.monotonic()
            console.print(f"reading {name}: {100 * done_bytes // max(1, total_bytes)} %", markup=False, soft_wrap=True)

    return show
