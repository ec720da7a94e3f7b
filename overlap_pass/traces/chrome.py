"""Reading a Kineto trace file (Chrome trace JSON, plain or gzip) without losing a nanosecond, in bounded memory.

Kineto writes microseconds with three decimals counted from an epoch; a float of that size is off by up to a quarter
of a microsecond, so times are read as literals and kept as integer nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overlap_pass.errors import TraceError
from overlap_pass.traces.reader import Reader
from overlap_pass.traces.records import TraceFile
from overlap_pass.traces.scan import Scanner
from overlap_pass.traces.source import Progress, Source

__all__ = ["read_file"]

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)


def read_file(path: str | Path, progress: Progress | None = None) -> TraceFile:
    """Read a ``.json`` or ``.json.gz`` trace; the file's content decides which it is.

    A file that ends early is read as far as it goes. Bytes that are no UTF-8, control characters, quotes and
    backslashes inside names are tolerated; each event that cannot be read is left out and counted.

    Raises:
        TraceError: no such file, or no list of events in it.
    """
    path = Path(path)
    source = Source(path, progress)
    reader = Reader(TraceFile(str(path)))
    scanner = Scanner(source, reader.take)
    for rows in scanner.batches():
        reader.add(rows)
    file = reader.file
    file.unreadable += scanner.broken
    file.mended = scanner.mended
    file.undecodable = source.undecodable
    file.damage = source.damage or ("" if scanner.complete else "the list of events was not written to its end")
    _describe(file, scanner.document, path)
    if file.damage and not file.seen:
        raise TraceError(f"{path}: holds no event that can be read: {file.damage}")
    return file


def _describe(file: TraceFile, document: Mapping[str, Any], path: Path) -> None:
    info = document.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    file.rank = _rank(info, path)
    world_size = info.get("world_size")
    file.world_size = world_size if isinstance(world_size, int) else None
    epoch_ns = document.get("baseTimeNanoseconds")
    file.epoch_ns = epoch_ns if isinstance(epoch_ns, int) else 0


def _rank(info: Mapping[str, Any], path: Path) -> int | None:
    rank = info.get("rank")
    if isinstance(rank, int):
        return rank
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None
