"""Reading a Kineto trace file (Chrome trace JSON, plain or gzip) without losing a nanosecond.

Kineto writes microseconds with three decimals counted from an epoch; a float of that size is off by up to a quarter
of a microsecond, so times are read as decimal literals and kept as integer nanoseconds.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from overlap_pass.errors import TraceError

__all__ = ["Event", "TraceFile", "read_file"]

_GZIP_MAGIC = b"\x1f\x8b"
_RANK_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)

# Half of a file or more is Python frames and flow arrows, which say nothing about the device.
_IGNORED_CATEGORIES = frozenset(
    {"", "ac2g", "async", "async_cpu_to_gpu", "fwdbwd", "overhead", "python_function", "trace"}
)


@dataclass(frozen=True, slots=True)
class Event:
    """One complete ("X") event.

    Attributes:
        category: lower case, as old traces write ``Kernel`` where new ones write ``kernel``.
        pid, tid: process and thread on the CPU; device and stream on the device. Numbers or text, as written.
        start_ns, end_ns: nanoseconds from the epoch of the file.
        args: what Kineto noted about the event.
    """

    category: str
    name: str
    pid: int | str
    tid: int | str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFile:
    """What a trace file holds, before anything is concluded from it.

    Attributes:
        rank, world_size: from ``distributedInfo``, the rank else from the file's name; ``None`` where not known.
        epoch_ns: ``baseTimeNanoseconds``: add it to an event's time to get the time of the machine's clock.
        events: in the file's order.
        unreadable: events left out because a time, a name or their shape is broken.
    """

    path: str
    rank: int | None
    world_size: int | None
    epoch_ns: int
    events: tuple[Event, ...]
    unreadable: int


def read_file(path: str | Path) -> TraceFile:
    """Read a ``.json`` or ``.json.gz`` trace; the file's content decides which it is.

    Bytes that are no UTF-8 and control characters inside names are tolerated.

    Raises:
        TraceError: no such file, damaged gzip, no JSON, or no list of events in it.
    """
    path = Path(path)
    document = _parse(_read_text(path), path)
    raw = document.get("traceEvents")
    if not isinstance(raw, list):
        raise TraceError(f"{path}: no list 'traceEvents': this is no PyTorch profiler trace")
    events = [_event(row) for row in raw if _is_wanted(row)]
    readable = tuple(event for event in events if event is not None)
    info = document.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    return TraceFile(
        path=str(path),
        rank=_rank(info, path),
        world_size=info.get("world_size"),
        epoch_ns=int(document.get("baseTimeNanoseconds") or 0),
        events=readable,
        unreadable=len(events) - len(readable) + sum(not isinstance(row, dict) for row in raw),
    )


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: the gzip file is damaged or was not written to its end ({error})") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror or error})") from error
    return content.decode("utf-8-sig", errors="replace")


def _parse(text: str, path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(text, parse_float=Decimal, strict=False)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: no JSON, or a file that was not written to its end ({error})") from error
    if isinstance(document, list):
        return {"traceEvents": document}
    if not isinstance(document, dict):
        raise TraceError(f"{path}: no list 'traceEvents': this is no PyTorch profiler trace")
    return document


def _is_wanted(row: object) -> bool:
    return isinstance(row, dict) and row.get("ph") == "X" and _category(row) not in _IGNORED_CATEGORIES


def _category(row: Mapping[str, Any]) -> str:
    return str(row.get("cat") or "").lower()


def _event(row: Mapping[str, Any]) -> Event | None:
    """The event, or ``None`` where it is broken: the caller counts those."""
    try:
        start_ns = _nanoseconds(row["ts"])
        end_ns = start_ns + _nanoseconds(row.get("dur", 0))
    except (KeyError, TypeError, InvalidOperation, OverflowError, ValueError):
        return None
    args = row.get("args")
    return Event(
        category=_category(row),
        name=str(row.get("name", "")),
        pid=_identifier(row.get("pid", "")),
        tid=_identifier(row.get("tid", "")),
        start_ns=start_ns,
        end_ns=end_ns,
        args=args if isinstance(args, dict) else {},
    )


def _nanoseconds(time_us: object) -> int:
    """Whole nanoseconds of a JSON number (or number in quotes) of microseconds."""
    if isinstance(time_us, int):
        return time_us * 1000
    return int((Decimal(str(time_us)) * 1000).to_integral_value())


def _identifier(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)


def _rank(info: Mapping[str, Any], path: Path) -> int | None:
    rank = info.get("rank")
    if isinstance(rank, int):
        return rank
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None
