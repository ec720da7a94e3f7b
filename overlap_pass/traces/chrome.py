"""Reading a Kineto trace file (Chrome trace JSON, plain or gzip) without losing a nanosecond, in bounded memory.

Kineto writes microseconds with three decimals counted from an epoch; a float of that size is off by up to a quarter
of a microsecond, so times are read as literals and kept as integer nanoseconds.

What ran on a device is kept event by event; what ran on the CPU, most of a file, in columns of numbers per thread.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from overlap_pass.errors import TraceError
from overlap_pass.traces.scan import Scanner
from overlap_pass.traces.source import Progress, Source

__all__ = ["Columns", "Event", "Mark", "Place", "Thread", "TraceFile", "read_file"]

Place = tuple[int | str, int | str]
"""Process and thread on the CPU, as written."""

_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)
_MARK = re.compile(r"ProfilerStep#(\d+)$")
_FURTHEST_NS = 1 << 62

_DEVICE = frozenset(
    {"kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "gpu_user_annotation"}
)
_CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
# Kineto projects the user's ranges on the device too ("gpu_user_annotation"): those span what it could link, no more.
_OPS = frozenset({"cpu_op", "operator", "user_annotation"})
_FRAMES = frozenset({"python_function"})
_LIBRARY_FRAME = re.compile(r"<|torch/|nn\.Module|.*(?:site-packages|dist-packages|lib/python)")
# The beginning of an event of the CPU as Kineto writes it, with a name that needs no unescaping.
_LAID_OUT = re.compile(
    r'\s*\{\s*"ph": "X",\s*"cat": "(cpu_op|user_annotation|cuda_runtime|cuda_driver)",'
    r'\s*"name": "([^"\\\x00-\x1f]*)",\s*"pid": (\d+),\s*"tid": (-?\d+),'
    r'\s*"ts": (\d+)(?:\.(\d{3}))?,\s*"dur": (\d+)(?:\.(\d{3}))?,\s*"args": \{'
)
_CORRELATION = re.compile(r'"correlation": (\d+)')
_KEPT_ARGUMENTS = ("device", "stream", "correlation", "grid")


@dataclass(frozen=True, slots=True)
class Event:
    """One complete ("X") event of a device.

    Attributes:
        category: lower case, as old traces write ``Kernel`` where new ones write ``kernel``.
        pid, tid: device and stream, in numbers or text, as written.
        start_ns, end_ns: nanoseconds from the epoch of the file.
        args: what Kineto noted about the event and is of use here; all of it where it names a collective.
    """

    category: str
    name: str
    pid: int | str
    tid: int | str
    start_ns: int
    end_ns: int
    args: Mapping[str, Any]


@dataclass(slots=True)
class Columns:
    """Events of one thread, one position in each column; ``names`` points into :attr:`TraceFile.names`."""

    starts_ns: array[int] = field(default_factory=lambda: array("q"))
    ends_ns: array[int] = field(default_factory=lambda: array("q"))
    names: array[int] = field(default_factory=lambda: array("l"))

    def __len__(self) -> int:
        return len(self.starts_ns)

    def append(self, start_ns: int, end_ns: int, name: int) -> None:
        self.starts_ns.append(start_ns)
        self.ends_ns.append(end_ns)
        self.names.append(name)

    def nested_order(self) -> Iterable[int]:
        """Positions by (start, longest first), so that what encloses comes before what is enclosed."""
        starts, ends = self.starts_ns, self.ends_ns
        return sorted(range(len(starts)), key=lambda i: (starts[i], -ends[i]))


@dataclass(slots=True)
class Thread:
    """What one CPU thread did.

    Attributes:
        ops: CPU ops and the user's ranges.
        calls: calls of the CUDA or HIP API; ``correlations`` has one number for each, 0 where there is none.
        frames: Python functions of the user's own files, where the trace was taken with stacks.
    """

    ops: Columns = field(default_factory=Columns)
    calls: Columns = field(default_factory=Columns)
    correlations: array[int] = field(default_factory=lambda: array("q"))
    frames: Columns = field(default_factory=Columns)


@dataclass(frozen=True, slots=True)
class Mark:
    """``ProfilerStep#number`` on a CPU thread."""

    number: int
    pid: int | str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class TraceFile:
    """What a trace file holds, before anything is concluded from it.

    Attributes:
        rank, world_size: from ``distributedInfo``, the rank else from the file's name; ``None`` where not known.
        epoch_ns: ``baseTimeNanoseconds``: add it to an event's time to get the time of the machine's clock.
        device: events of devices, in the file's order.
        threads: (process, thread) → what it did.
        names: what the columns' numbers mean.
        ranges: which of these numbers are the user's (or a library's) ranges, and no CPU ops.
        marks: the profiler's steps on the CPU, in the file's order.
        seen: events looked at.
        unreadable: events left out because a time, a name or their shape is broken.
        mended: events read after characters that are not allowed in JSON were escaped.
        undecodable: characters that were no UTF-8.
        damage: why the file ends early, ``""`` where it does not.
    """

    path: str
    rank: int | None = None
    world_size: int | None = None
    epoch_ns: int = 0
    device: list[Event] = field(default_factory=list)
    threads: dict[Place, Thread] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    ranges: set[int] = field(default_factory=set)
    marks: list[Mark] = field(default_factory=list)
    seen: int = 0
    unreadable: int = 0
    mended: int = 0
    undecodable: int = 0
    damage: str = ""


def read_file(path: str | Path, progress: Progress | None = None) -> TraceFile:
    """Read a ``.json`` or ``.json.gz`` trace; the file's content decides which it is.

    A file that ends early is read as far as it goes. Bytes that are no UTF-8, control characters, quotes and
    backslashes inside names are tolerated; each event that cannot be read is left out and counted.

    Raises:
        TraceError: no such file, or no list of events in it.
    """
    path = Path(path)
    source = Source(path, progress)
    reader = _Reader(TraceFile(str(path)))
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


class _Reader:
    """Sorts rows into a :class:`TraceFile`."""

    def __init__(self, file: TraceFile) -> None:
        self.file = file
        self._numbers: dict[str, int] = {}
        self._categories: dict[object, str] = {}
        self._places: dict[tuple[str, str], Place] = {}

    def add(self, rows: Iterable[object]) -> None:
        for row in rows:
            if not isinstance(row, dict):
                self.file.unreadable += 1
            elif row.get("ph") == "X":
                try:
                    self._add(row)
                except (KeyError, TypeError, InvalidOperation, OverflowError, ValueError):
                    self.file.unreadable += 1

    def _add(self, row: Mapping[str, Any]) -> None:
        written = row.get("cat")
        category = self._categories.get(written) if isinstance(written, str) else ""
        if category is None:
            category = self._categories[written] = str(written).lower()
        self.file.seen += 1
        if category in _OPS or category in _CALLS or category in _FRAMES:
            self._add_cpu(row, category)
        elif category in _DEVICE:
            self._add_device(row, category)

    def take(self, text: str) -> bool:
        """Read an event of the CPU out of its text, as Kineto lays it out, without parsing its arguments: those are most of
        a file. Anything else is left to the parser."""
        match = _LAID_OUT.match(text)
        if match is None:
            return False
        category, name, pid, tid, start, start_ns, duration, duration_ns = match.groups()
        correlation = _CORRELATION.search(text, match.end()) if category in _CALLS else None
        begin_ns = int(start + (start_ns or "000"))
        end_ns = begin_ns + int(duration + (duration_ns or "000"))
        if end_ns >= _FURTHEST_NS:
            return False
        self.file.seen += 1
        place = self._places.get((pid, tid))
        if place is None:
            place = self._places[pid, tid] = int(pid), int(tid)
        self._keep(category, name, place, (begin_ns, end_ns), int(correlation[1]) if correlation else 0)
        return True

    def _add_cpu(self, row: Mapping[str, Any], category: str) -> None:
        times_ns = _times_ns(row)
        place = _identifier(row.get("pid", "")), _identifier(row.get("tid", ""))
        name = str(row.get("name", ""))
        if category in _FRAMES and _LIBRARY_FRAME.match(name):
            return
        correlation = (row.get("args") or {}).get("correlation") if category in _CALLS else 0
        self._keep(category, name, place, times_ns, correlation if isinstance(correlation, int) else 0)

    def _keep(self, category: str, name: str, place: Place, times_ns: tuple[int, int], correlation: int) -> None:
        thread = self.file.threads.get(place)
        if thread is None:
            thread = self.file.threads[place] = Thread()
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.file.names)
            self.file.names.append(name)
        if category in _OPS:
            thread.ops.append(*times_ns, number)
            if category == "user_annotation":
                self.file.ranges.add(number)
            if match := _MARK.match(name):
                self.file.marks.append(Mark(int(match[1]), place[0], *times_ns))
        elif category in _CALLS:
            thread.correlations.append(correlation if 0 < correlation < _FURTHEST_NS else 0)
            thread.calls.append(*times_ns, number)
        else:
            thread.frames.append(*times_ns, number)

    def _add_device(self, row: Mapping[str, Any], category: str) -> None:
        name = str(row.get("name", ""))
        if category == "gpu_user_annotation" and not name.startswith("nccl:"):
            return
        start_ns, end_ns = _times_ns(row)
        args = row.get("args")
        args = args if isinstance(args, dict) else {}
        if "Collective name" not in args:
            args = {key: args[key] for key in _KEPT_ARGUMENTS if key in args}
        self.file.device.append(
            Event(
                category,
                name,
                _identifier(row.get("pid", "")),
                _identifier(row.get("tid", "")),
                start_ns,
                end_ns,
                args,
            )
        )


def _times_ns(row: Mapping[str, Any]) -> tuple[int, int]:
    start_ns, duration_ns = _nanoseconds(row["ts"]), _nanoseconds(row.get("dur", 0))
    if not -_FURTHEST_NS < start_ns < _FURTHEST_NS:
        raise OverflowError
    # A duration of years is another matter: the event did start, and is shortened where it is used.
    return start_ns, start_ns + max(-_FURTHEST_NS, min(duration_ns, _FURTHEST_NS))


def _nanoseconds(time_us: object) -> int:
    """Whole nanoseconds of a JSON number, its literal, or a number in quotes, of microseconds."""
    if type(time_us) is int:
        return time_us * 1000
    if type(time_us) is str:
        whole, _, decimals = time_us.partition(".")
        if len(decimals) == 3 and decimals.isdigit() and whole.isdigit():
            return int(whole + decimals)
    return int((Decimal(str(time_us)) * 1000).to_integral_value())


def _identifier(value: object) -> int | str:
    return value if isinstance(value, int) else str(value)


def _rank(info: Mapping[str, Any], path: Path) -> int | None:
    rank = info.get("rank")
    if isinstance(rank, int):
        return rank
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else None
