"""What a CPU thread was at while a device had nothing to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from overlap_pass.timeline.intervals import Interval, union
from overlap_pass.traces.launches import enclosing
from overlap_pass.traces.records import Place, Thread, TraceFile

__all__ = ["Activities", "Activity", "Sync"]

_SYNC = re.compile(r"(?:cuda|hip|cu)\w*Synchronize|(?:cuda|hip)(?:Memcpy|Memset)$|cuMemcpy\w*(?<!Async)$")
_ALLOCATION = re.compile(
    r"(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree|HostRegister)|(?:cu|hip)Mem(?:Alloc|Free|Map|Unmap|Create|Release)"
)
_LOADER = "enumerate(DataLoader)#"


@dataclass(frozen=True, slots=True)
class Sync:
    """One call in which the CPU waited for the device.

    Attributes:
        start_ns, end_ns: from the call's begin to its return.
        call: ``"cudaStreamSynchronize"``, …
        op: the innermost CPU op around it: ``"aten::_local_scalar_dense"`` is what ``.item()`` runs.
        code: the user's function that made it, ``"step (train.py:42)"``, where the trace has stacks.
    """

    start_ns: int
    end_ns: int
    call: str
    op: str
    code: str | None


@dataclass(frozen=True, slots=True)
class Activity:
    """What one thread did, as sets of intervals; they may cover each other."""

    syncs: tuple[Sync, ...]
    waiting: Sequence[Interval]
    loading: Sequence[Interval]
    allocating: Sequence[Interval]
    dispatching: Sequence[Interval]


class Activities:
    """Looks at each thread when it is first asked for."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self._found: dict[Place, Activity] = {}

    def of(self, place: Place) -> Activity:
        if place not in self._found:
            self._found[place] = _activity(self._file, self._file.threads.get(place, Thread()))
        return self._found[place]


def _activity(file: TraceFile, thread: Thread) -> Activity:
    names, calls, ops = file.names, thread.calls, thread.ops
    is_sync = [bool(_SYNC.match(name)) for name in names]
    is_allocation = [bool(_ALLOCATION.match(name)) for name in names]
    is_loader = [name.startswith(_LOADER) for name in names]
    # A range around other things, a step's mark above all, does not say that the thread was in an op.
    is_op = [i not in file.ranges and not name.startswith("ProfilerStep#") for i, name in enumerate(names)]
    syncs = tuple(_syncs(names, thread, [i for i in range(len(calls)) if is_sync[calls.names[i]]]))
    return Activity(
        syncs=syncs,
        waiting=union((sync.start_ns, sync.end_ns) for sync in syncs),
        loading=union((ops.starts_ns[i], ops.ends_ns[i]) for i in range(len(ops)) if is_loader[ops.names[i]]),
        allocating=union(
            (calls.starts_ns[i], calls.ends_ns[i]) for i in range(len(calls)) if is_allocation[calls.names[i]]
        ),
        dispatching=union(
            [
                *((ops.starts_ns[i], ops.ends_ns[i]) for i in range(len(ops)) if is_op[ops.names[i]]),
                *zip(calls.starts_ns, calls.ends_ns, strict=True),
            ]
        ),
    )


def _syncs(names: Sequence[str], thread: Thread, calls: Sequence[int]) -> Iterable[Sync]:
    code = _user_code(names, thread, calls)
    for i, within in enclosing(names, thread, calls):
        start_ns, end_ns = thread.calls.starts_ns[i], thread.calls.ends_ns[i]
        yield Sync(start_ns, end_ns, names[thread.calls.names[i]], within.op, code.get(i))


def _user_code(names: Sequence[str], thread: Thread, calls: Iterable[int]) -> dict[int, str]:
    """Call → the innermost of the user's Python functions around it."""
    frames = thread.frames
    if not len(frames):
        return {}
    found: dict[int, str] = {}
    open_frames: list[int] = []
    order = iter(frames.nested_order())
    upcoming = next(order, None)
    for call in sorted(calls, key=thread.calls.starts_ns.__getitem__):
        time_ns = thread.calls.starts_ns[call]
        while upcoming is not None and frames.starts_ns[upcoming] <= time_ns:
            open_frames.append(upcoming)
            upcoming = next(order, None)
        open_frames = [frame for frame in open_frames if frames.ends_ns[frame] > time_ns]
        if open_frames:
            found[call] = _readable(names[frames.names[open_frames[-1]]])
    return found


def _readable(frame: str) -> str:
    """
    >>> _readable("src/train.py(42): step")
    'step (src/train.py:42)'
    """
    match = re.fullmatch(r"(.+)\((\d+)\): (.+)", frame)
    return f"{match[3]} ({match[1]}:{match[2]})" if match else frame
