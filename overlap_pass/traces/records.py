"""What a trace file holds, before anything is concluded from it.

What ran on a device is kept event by event; what ran on the CPU, most of a file, in columns of numbers per thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["Columns", "Event", "Mark", "Place", "Thread", "TraceFile"]

Place = tuple[int | str, int | str]
"""Process and thread on the CPU, as written."""


class Event(NamedTuple):
    """One complete ("X") event of a device. (A frozen dataclass takes three times as long to make.)

    Attributes:
        category: lower case, as old traces write ``Kernel`` where new ones write ``kernel``.
        pid, tid: device and stream, in numbers or text, as written.
        start_ns, end_ns: nanoseconds from the epoch of the file.
        device, stream: from the arguments; ``None`` where they do not say.
        correlation: shared with the call that launched it; 0 where there is none, as ROCm writes it.
        grid: of a kernel, as text.
        args: all of the arguments where they name a collective, else empty.
    """

    category: str
    name: str
    pid: int | str
    tid: int | str
    start_ns: int
    end_ns: int
    device: int | None = None
    stream: int | str | None = None
    correlation: int = 0
    grid: str = ""
    args: Mapping[str, Any] = {}


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
        # Two stable sorts by numbers take half of one by pairs.
        longest_first = sorted(range(len(self)), key=self.ends_ns.__getitem__, reverse=True)
        return sorted(longest_first, key=self.starts_ns.__getitem__)


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
    """One step of the CPU: ``ProfilerStep#number``, or what was taken for one."""

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
