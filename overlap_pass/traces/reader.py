"""Sorts the events of a file into a :class:`TraceFile`: most out of their text, the rest as parsed JSON.

Parsing costs several times what looking does, and most of an event is arguments that nobody asks for here. So an event
laid out as Kineto lays it out is read by one regular expression for its head, and by one more for what is of use in its
arguments; whatever looks different goes to the JSON parser.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from overlap_pass.traces.records import Event, Mark, Place, Thread, TraceFile

__all__ = ["Reader"]

_MARK = re.compile(r"ProfilerStep#(\d+)$")
_FURTHEST_NS = 1 << 62

_RANGE = "gpu_user_annotation"
_RANGE_OF_COLLECTIVE = "nccl:"
_DEVICE = frozenset({"kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", _RANGE})
_CALLS = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
# Kineto projects the user's ranges on the device too ("gpu_user_annotation"): those span what it could link, no more.
_OPS = frozenset({"cpu_op", "operator", "user_annotation"})
_FRAMES = frozenset({"python_function"})

_LIBRARY = r"(?:<|torch/|nn\.Module|[^\"]*(?:site-packages|dist-packages|lib/python))"
_LIBRARY_FRAME = re.compile(_LIBRARY)
# Half of a file or more: flow arrows, metadata and marks (no "X"), and Python frames that are not the user's.
_UNWANTED = re.compile(
    r"""\s*\{\s*"ph"\s*:\s*"(?:[^X]"|X"\s*,\s*"cat"\s*:\s*"(?:
          (?:ac2g|fwdbwd|async|async_cpu_to_gpu|overhead|[Tt]race)"
        | python_function"\s*,\s*"name"\s*:\s*"""
    + f'"{_LIBRARY}))',
    re.VERBOSE,
)
# The beginning of an event as Kineto writes it, with a name that needs no unescaping: category, name, process and
# thread, begin and duration in microseconds, whole or to the nanosecond.
_HEAD = re.compile(
    r'\s*\{\s*"ph":\s*"X",\s*"cat":\s*"(\w+)",\s*"name":\s*"([^"\\\x00-\x1f]*)",'
    r'\s*("pid":[^,]+,\s*"tid":[^,]+),'
    r'\s*"ts":\s*(\d{1,19}(?:\.\d{3})?),\s*"dur":\s*(\d{1,19}(?:\.\d{3})?),\s*"args":\s*\{'
)
_CORRELATION = re.compile(r'"correlation":\s*(\d{1,19})')
_DEVICE_ARGUMENTS = re.compile(
    r'"device":\s*(\d{1,9}),\s*(?:"context":\s*\d+,\s*)?"stream":\s*(\d{1,9}),\s*"correlation":\s*(\d{1,19})'
)
_GRID = re.compile(r'"grid":\s*(\[[\d, ]*\])')
_NAMES_COLLECTIVE = '"Collective name"'

_About = tuple[int | None, int | str | None, int, str]
"""Device, stream, correlation and grid of a kernel."""


class Reader:
    """Fills one :class:`TraceFile`."""

    def __init__(self, file: TraceFile) -> None:
        self.file = file
        self._names = _Names(file)
        self._texts: dict[str, str] = {}
        self._sinks: dict[tuple[str, Place], _OnCpu | _OnDevice | None] = {}
        self._written: dict[tuple[str, str], _OnCpu | _OnDevice | None] = {}

    def take(self, texts: Iterable[str]) -> list[str]:
        """Read what can be read without parsing, drop what nobody asks for, and give back the rest."""
        head, unwanted, written = _HEAD.match, _UNWANTED.match, self._written
        rest: list[str] = []
        seen = 0
        for text in texts:
            found = head(text)
            if found is None:
                if not unwanted(text):
                    rest.append(text)
                continue
            category, name, place, start, length = found.groups()
            try:
                sink = written[category, place]
            except KeyError:
                sink = written[category, place] = self._sink(category, _place(place))
            start_ns = int(start.replace(".", "")) if "." in start else 1000 * int(start)
            end_ns = start_ns + (int(length.replace(".", "")) if "." in length else 1000 * int(length))
            if end_ns >= _FURTHEST_NS or (sink and not sink.take(name, start_ns, end_ns, text, found.end())):
                rest.append(text)
                continue
            seen += 1
        self.file.seen += seen
        return rest

    def add(self, rows: Iterable[object]) -> None:
        """Keep parsed events; those whose shape is broken are counted."""
        for row in rows:
            if not isinstance(row, dict):
                self.file.unreadable += 1
            elif row.get("ph") == "X":
                try:
                    self._add(row)
                except (KeyError, TypeError, InvalidOperation, OverflowError, ValueError):
                    self.file.unreadable += 1

    def _add(self, row: Mapping[str, Any]) -> None:
        self.file.seen += 1
        place = _identifier(row.get("pid", "")), _identifier(row.get("tid", ""))
        sink = self._sink(str(row.get("cat")), place)
        if sink:
            args = row.get("args")
            sink.add(str(row.get("name", "")), *_times_ns(row), args if isinstance(args, dict) else {})

    def _sink(self, written: str, place: Place) -> _OnCpu | _OnDevice | None:
        """Where events of this category and thread go, ``None`` for a category of no use."""
        category = written.lower()
        if (category, place) not in self._sinks:
            self._sinks[category, place] = self._open(category, place)
        return self._sinks[category, place]

    def _open(self, category: str, place: Place) -> _OnCpu | _OnDevice | None:
        if category in _DEVICE:
            return _OnDevice(self.file, category, place, self._texts)
        if category in _OPS or category in _CALLS or category in _FRAMES:
            return _OnCpu(self.file, category, place, self._names)
        return None


class _Names:
    """Name → its number in :attr:`TraceFile.names`, and what is to be known of it."""

    def __init__(self, file: TraceFile) -> None:
        self.numbers: dict[str, int] = {}
        self.frames: dict[str, int] = {}
        self.marks: dict[int, int] = {}
        self._names = file.names

    def number(self, name: str) -> int:
        """Of a name that may be new."""
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self._names)
            self._names.append(name)
            if match := _MARK.match(name):
                self.marks[number] = int(match[1])
        return number

    def number_of_frame(self, name: str) -> int:
        """Likewise; −1 for a frame of a library."""
        number = self.frames[name] = -1 if _LIBRARY_FRAME.match(name) else self.number(name)
        return number


class _OnCpu:
    """Takes the events of one category of one thread."""

    def __init__(self, file: TraceFile, category: str, place: Place, names: _Names) -> None:
        thread = file.threads.setdefault(place, Thread())
        self._file = file
        self._pid = place[0]
        self._correlations: array[int] | None = thread.correlations if category in _CALLS else None
        self._ranges = file.ranges if category == "user_annotation" else None
        self._marks = names.marks if category in _OPS else {}
        self._numbers, self._new = names.numbers, names.number
        columns = thread.ops if category in _OPS else thread.calls
        if category in _FRAMES:
            self._numbers, self._new, columns = names.frames, names.number_of_frame, thread.frames
        self._add_start, self._add_end = columns.starts_ns.append, columns.ends_ns.append
        self._add_name = columns.names.append

    def take(self, name: str, start_ns: int, end_ns: int, text: str, position: int) -> bool:
        """Keep an event whose arguments begin at ``position`` of its text."""
        found = None if self._correlations is None else _CORRELATION.search(text, position)
        self._keep(name, start_ns, end_ns, int(found[1]) if found else 0)
        return True

    def add(self, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        """Keep a parsed event."""
        correlation = args.get("correlation")
        self._keep(name, start_ns, end_ns, correlation if isinstance(correlation, int) else 0)

    def _keep(self, name: str, start_ns: int, end_ns: int, correlation: int) -> None:
        number = self._numbers.get(name)
        if number is None:
            number = self._new(name)
        if number < 0:
            return
        self._add_start(start_ns)
        self._add_end(end_ns)
        self._add_name(number)
        if self._correlations is not None:
            self._correlations.append(correlation if 0 < correlation < _FURTHEST_NS else 0)
        if self._ranges is not None:
            self._ranges.add(number)
        if number in self._marks:
            self._file.marks.append(Mark(self._marks[number], self._pid, start_ns, end_ns))


class _OnDevice:
    """Takes the events of one category of one stream."""

    def __init__(self, file: TraceFile, category: str, place: Place, texts: dict[str, str]) -> None:
        """``texts`` holds each name once, however many events have it."""
        self._file, self._category, self._place, self._texts = file, category, place, texts

    def take(self, name: str, start_ns: int, end_ns: int, text: str, position: int) -> bool:
        """Keep an event whose arguments begin at ``position`` of its text; ``False`` if they have to be parsed."""
        if self._category == _RANGE:
            return not name.startswith(_RANGE_OF_COLLECTIVE)
        found = _DEVICE_ARGUMENTS.search(text, position)
        if found is None or _NAMES_COLLECTIVE in text:
            return False
        device, stream, correlation = map(int, found.groups())
        sized = _GRID.search(text, found.end())
        self._keep(name, start_ns, end_ns, (device, stream, correlation, sized[1] if sized else ""), {})
        return True

    def add(self, name: str, start_ns: int, end_ns: int, args: Mapping[str, Any]) -> None:
        """Keep a parsed event."""
        if self._category == _RANGE and not name.startswith(_RANGE_OF_COLLECTIVE):
            return
        device, stream, correlation = (args.get(key) for key in ("device", "stream", "correlation"))
        about = (
            device if isinstance(device, int) else None,
            stream if isinstance(stream, int | str) else None,
            correlation if isinstance(correlation, int) else 0,
            str(args.get("grid", "")),
        )
        self._keep(name, start_ns, end_ns, about, args if "Collective name" in args else {})

    def _keep(self, name: str, start_ns: int, end_ns: int, about: _About, args: Mapping[str, Any]) -> None:
        once, (device, stream, correlation, grid) = self._texts.setdefault, about
        name, grid = once(name, name), once(grid, grid)
        pid, tid = self._place
        self._file.device.append(
            Event(self._category, name, pid, tid, start_ns, end_ns, device, stream, correlation, grid, args)
        )


def _place(written: str) -> Place:
    """Process and thread out of their text; what is no JSON stays text, so that nothing is lost."""
    try:
        row = json.loads(f"{{{written}}}")
        return _identifier(row["pid"]), _identifier(row["tid"])
    except (ValueError, KeyError):
        return written, ""


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
