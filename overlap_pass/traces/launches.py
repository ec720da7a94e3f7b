"""Which call of the CPU launched what ran on a device, and inside which ops it was made.

A call and what it launched share a *correlation*. Such numbers are unique within one process only, so in a file that
several ranks were merged into they repeat; then the process that launches most of the device's other work is meant.
ROCm writes 0 for the kernels of collectives: those are told by their order; see :mod:`overlap_pass.traces.in_order`.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlap_pass.traces.names import is_collective_kernel, issues_collective
from overlap_pass.traces.records import Event, Place, Thread, TraceFile

__all__ = ["Enclosure", "Launch", "Launches", "find_launches"]

_RANGE_OF_UNIT = re.compile(r"FSDP::\w+(?: \((.+)\))?$")
ROOT_UNIT = "(root)"


@dataclass(frozen=True, slots=True)
class Enclosure:
    """What encloses a call on its thread.

    Attributes:
        op: the innermost CPU op or range, ``""`` where there is none.
        unit: the FSDP module whose hook made the call, from the innermost ``FSDP::… (module)`` range.
        hook: that range without the module: ``"FSDP::all_gather_copy_in"``.
    """

    op: str = ""
    unit: str | None = None
    hook: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One call that put work on a device.

    Attributes:
        start_ns: when the call began.
        place: the thread that made it.
        call: ``"cudaLaunchKernel"``, …
        within: the ops around it.
        in_order: known by its place among the others, not by a correlation.
    """

    start_ns: int
    place: Place
    call: str
    within: Enclosure
    in_order: bool = False


@dataclass(frozen=True, slots=True)
class Launches:
    """Correlation → calls.

    Attributes:
        by_correlation: several calls for one number only where files of several processes were merged.
        repeated: how many numbers that concerns.
        unanswered: launches inside the ops of collectives that no device event shares a number with, by time; looked
            for only where a kernel of a collective has no number.
    """

    by_correlation: Mapping[int, Sequence[Launch]]
    repeated: int
    unanswered: Sequence[Launch] = ()

    def of(self, events: Sequence[Event]) -> list[Launch | None]:
        """The call behind each event, ``None`` where no call has its number."""
        found = [self.by_correlation.get(event.correlation, ()) for event in events]
        if not self.repeated:
            return [calls[0] if calls else None for calls in found]
        owner = self._owners(events, found)
        return [_choose(event, calls, owner.get(event.pid)) for event, calls in zip(events, found, strict=True)]

    @staticmethod
    def _owners(events: Sequence[Event], found: Sequence[Sequence[Launch]]) -> dict[int | str, int | str]:
        """Device's process id in the trace → the CPU process that launches on it, by majority of what fits in time."""
        votes: dict[int | str, Counter[int | str]] = defaultdict(Counter)
        for event, calls in zip(events, found, strict=True):
            fitting = {call.place[0] for call in calls if call.start_ns <= event.start_ns}
            if len(fitting) == 1:
                votes[event.pid].update(fitting)
        return {pid: max(sorted(count, key=str), key=count.__getitem__) for pid, count in votes.items()}


def _choose(event: Event, calls: Sequence[Launch], owner: int | str | None) -> Launch | None:
    """The call before the event, of the process that owns the device if that has one, else the latest."""
    before = [call for call in calls if call.start_ns <= event.start_ns] or list(calls)
    owned = [call for call in before if call.place[0] == owner] or before
    return max(owned, key=lambda call: call.start_ns, default=None)


def find_launches(file: TraceFile) -> Launches:
    """The calls that launched the device events of a file.

    All kernels of a CUDA graph share the correlation of their one graph launch.
    """
    wanted = {event.correlation for event in file.device} - {0}
    found: dict[int, list[Launch]] = defaultdict(list)
    for place, thread in file.threads.items():
        made = [i for i, correlation in enumerate(thread.correlations) if correlation in wanted]
        for i, within in enclosing(file.names, thread, made):
            call = Launch(thread.calls.starts_ns[i], place, file.names[thread.calls.names[i]], within)
            found[thread.correlations[i]].append(call)
    repeated = sum(len(calls) > 1 for calls in found.values())
    lost = any(event.correlation == 0 and is_collective_kernel(event.name) for event in file.device)
    return Launches(found, repeated, tuple(_unanswered(file, wanted)) if lost else ())


def _unanswered(file: TraceFile, answered: Collection[int]) -> list[Launch]:
    is_launch = ["LaunchKernel" in name for name in file.names]
    found: list[Launch] = []
    for place, thread in file.threads.items():
        calls = thread.calls
        lonely = [
            i for i, number in enumerate(thread.correlations) if is_launch[calls.names[i]] and number not in answered
        ]
        for i, within in enclosing(file.names, thread, lonely):
            if issues_collective(within.op):
                found.append(Launch(calls.starts_ns[i], place, file.names[calls.names[i]], within, in_order=True))
    return sorted(found, key=lambda launch: launch.start_ns)


def enclosing(names: Sequence[str], thread: Thread, calls: Iterable[int]) -> Iterator[tuple[int, Enclosure]]:
    """Each of the thread's calls with what encloses it, by start."""
    ops, starts = thread.ops, thread.calls.starts_ns
    stack = _Stack(names)
    order = iter(ops.nested_order())
    upcoming = next(order, None)
    for call in sorted(calls, key=starts.__getitem__):
        time_ns = starts[call]
        while upcoming is not None and ops.starts_ns[upcoming] <= time_ns:
            # What has ended by then encloses neither this call nor a later one.
            if ops.ends_ns[upcoming] > time_ns:
                stack.push(ops.names[upcoming], ops.starts_ns[upcoming], ops.ends_ns[upcoming])
            upcoming = next(order, None)
        stack.pop_until(time_ns)
        yield call, stack.top()


class _Stack:
    """The ops that are open at a time, innermost last, each with what it and those around it say of a call inside."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._open: list[tuple[int, Enclosure]] = []
        self._made: dict[tuple[int, str | None, str | None], Enclosure] = {}

    def push(self, name: int, start_ns: int, end_ns: int) -> None:
        self.pop_until(start_ns)
        around = self.top()
        key = name, around.unit, around.hook
        if key not in self._made:
            self._made[key] = _inside(self._names[name], around)
        self._open.append((end_ns, self._made[key]))

    def pop_until(self, time_ns: int) -> None:
        while self._open and self._open[-1][0] <= time_ns:
            self._open.pop()

    def top(self) -> Enclosure:
        return self._open[-1][1] if self._open else _NOTHING


_NOTHING = Enclosure()


def _inside(op: str, around: Enclosure) -> Enclosure:
    if match := _RANGE_OF_UNIT.match(op):
        return Enclosure(op, match[1] or ROOT_UNIT, op.split(" ", 1)[0])
    return Enclosure(op, around.unit, around.hook)
