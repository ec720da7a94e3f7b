"""Steps of a trace whose writer never called ``profiler.step()``.

An optimizer says when it steps: ``Optimizer.step#AdamW.step`` is in every trace of one, and from the end of one to the end
of the next is a step. Where there is none, a training loop still launches the same collectives over and over: the shortest
sequence that repeats is a step, and it begins where the CPU pauses longest between two of its launches.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise

from overlap_pass.traces.kernels import DeviceEvent
from overlap_pass.traces.records import Mark, TraceFile

__all__ = ["StepSource", "find_marks", "shortest_period"]

_OPTIMIZER = "Optimizer.step#"
LEAST_REPEATS = 3
"""What happens twice may be chance."""


class StepSource(enum.StrEnum):
    """What says where a step begins."""

    PROFILER = "profiler"
    """``ProfilerStep#n``."""
    OPTIMIZER = "optimizer"
    COLLECTIVES = "collectives"
    NOTHING = "nothing"
    """The figures are of the whole trace."""


def find_marks(file: TraceFile, events: Sequence[DeviceEvent]) -> tuple[tuple[Mark, ...], StepSource]:
    """The CPU's steps, by the first source that has some.

    Args:
        file: what the CPU did.
        events: of all devices, sorted by start.
    """
    if file.marks:
        return tuple(file.marks), StepSource.PROFILER
    if marks := _between(_optimizer_ends(file)):
        return marks, StepSource.OPTIMIZER
    if marks := _by_collectives(events):
        return marks, StepSource.COLLECTIVES
    return (), StepSource.NOTHING


def _between(times: Sequence[tuple[int, int | str]]) -> tuple[Mark, ...]:
    """Marks from each (time, process) to the next; none where those are too few to be a habit."""
    if len(times) < LEAST_REPEATS:
        return ()
    return tuple(
        Mark(number, pid, start_ns, end_ns) for number, ((start_ns, pid), (end_ns, _)) in enumerate(pairwise(times))
    )


def _optimizer_ends(file: TraceFile) -> list[tuple[int, int | str]]:
    """When the optimizer's steps ended; of several that take turns, the last one's. Nothing where they do not take turns."""
    found: list[tuple[int, int | str, str]] = []
    numbers = {number for number, name in enumerate(file.names) if name.startswith(_OPTIMIZER)}
    for (pid, _), thread in file.threads.items():
        ops = thread.ops
        found.extend((ops.ends_ns[i], pid, file.names[n]) for i, n in enumerate(ops.names) if n in numbers)
    found.sort(key=lambda end: (end[0], str(end[1]), end[2]))
    if len(set(Counter(name for _, _, name in found).values())) != 1 or len({pid for _, pid, _ in found}) != 1:
        return []
    last = found[-1][2]
    return [(end_ns, pid) for end_ns, pid, name in found if name == last]


def _by_collectives(events: Iterable[DeviceEvent]) -> tuple[Mark, ...]:
    """Marks from the repeating sequence of collectives, of a file with one device."""
    events = list(events)
    if len({event.device for event in events}) != 1:
        return ()
    launches = [(event.launch, event) for event in events if event.launch is not None]
    issued = [(launch, event) for launch, event in launches if event.rule is not None]
    issued.sort(key=lambda pair: (pair[0].start_ns, pair[1].span.start_ns))
    counts = Counter(_key(event) for _, event in issued)
    # A loss that is reduced now and then, or a broadcast at the start, does not repeat and must not hide what does.
    issued = [(launch, event) for launch, event in issued if counts[_key(event)] >= LEAST_REPEATS]
    keys = [_key(event) for _, event in issued]
    period = shortest_period(keys)
    if period is None or len(set(keys[:period])) < 2:
        # One collective over and over is a layer rather than a step.
        return ()
    times = [launch.start_ns for launch, _ in issued]
    first = _longest_pause(times, period)
    places = [(times[i], issued[i][0].place[0]) for i in range(first, len(times), period)]
    if (len(times) - first) % period == 0:
        places.append((max(launch.start_ns for launch, _ in launches) + 1, places[-1][1]))
    return _between(places)


def _key(event: DeviceEvent) -> Hashable:
    return event.span.collective, event.span.payload_bytes, event.span.unit, event.span.lane


def _longest_pause(times: Sequence[int], period: int) -> int:
    """The position in the sequence, below ``period``, that the longest pause comes before."""
    from statistics import median  # slow to import, and most traces have steps

    pauses = [[times[i] - times[i - 1] for i in range(start, len(times), period) if i] for start in range(period)]
    return max(range(period), key=lambda start: (median(pauses[start]), -start))


def shortest_period(keys: Sequence[Hashable]) -> int | None:
    """The shortest p with ``keys[i] == keys[i + p]`` throughout, ``None`` if the keys do not hold it three times.

    >>> shortest_period("abcabcabca")
    3
    """
    # The longest proper border of a sequence leaves its shortest period (Knuth, Morris and Pratt).
    border = [0] * len(keys)
    for i in range(1, len(keys)):
        length = border[i - 1]
        while length and keys[i] != keys[length]:
            length = border[length - 1]
        border[i] = length + (keys[i] == keys[length])
    period = len(keys) - border[-1] if keys else 0
    return period if 0 < period * LEAST_REPEATS <= len(keys) else None
