"""Windows of the step before and behind each fixed op, and each lane as a single machine: facts 2 to 4 of the bound."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from overlap_pass.simulate.loads import LaneLoad
from overlap_pass.simulate.precedence import Precedence

__all__ = ["head_and_tail_us", "jackson_us"]

_Times = np.ndarray[Any, np.dtype[np.float64]]


def head_and_tail_us(facts: Precedence, lanes: Sequence[LaneLoad], slowest: float) -> float:
    """The largest bound that any window, pair of windows, chain through them, or single machine gives.

    Args:
        facts: what must precede what.
        lanes: the collectives.
        slowest: the largest contention factor of compute.
    """
    compute = _Compute(facts)
    windows = [_LaneWindows(lane, facts, compute, slowest) for lane in lanes]
    ready, left = facts.chains(_floors(compute, windows), _rests(compute, windows))
    best_us = max((early + late for early, late in zip(ready, left, strict=True)), default=0.0)
    best_us = max([best_us, *(window.whole_us for window in windows)])
    kernels = [position for position, counts in enumerate(facts.is_compute) if counts]
    machines = [[(ready[p], facts.duration_us[p], facts.behind_us(p, left)) for p in kernels]]
    machines += [[(ready[j.launch], j.time_us, facts.behind_us(j.launch, left)) for j in lane.jobs] for lane in lanes]
    return max(best_us, *map(jackson_us, machines))


class _Compute:
    """Compute around each fixed op, by rank.

    Attributes:
        own_us: the op itself.
        before_us: all that has ended when it starts.
        behind_us: all that starts after it has ended.
        issued_us: when the CPU has issued it, at the earliest.
    """

    def __init__(self, facts: Precedence) -> None:
        count = len(facts.fixed)
        before_us, behind_us, issued_us = ([0.0] * (count + 1) for _ in range(3))
        for position, duration_us in enumerate(facts.duration_us if count else ()):
            issued_us[facts.rank.get(position, facts.before[position])] += facts.launch_us[position]
            if facts.is_compute[position]:
                before_us[facts.before[position]] += duration_us
                _add(behind_us, facts.after[position], duration_us)
        self.own_us = np.array([facts.duration_us[position] for position in facts.fixed])
        self.before_us = np.cumsum(before_us)[:-1]
        self.behind_us = _suffix_sums(behind_us)[:-1]
        self.issued_us = np.cumsum(issued_us)[:-1] - facts.cpu_ahead_us

    def until_us(self, rank: int) -> float:
        """All that has ended when the fixed op has; nothing for -1."""
        return float(self.before_us[rank] + self.own_us[rank]) if rank >= 0 else 0.0

    def since_us(self, rank: int) -> float:
        """All that starts with the fixed op or after it; nothing for one past the last."""
        return float(self.own_us[rank] + self.behind_us[rank]) if rank < len(self.own_us) else 0.0


class _LaneWindows:
    """The collectives of one lane before and behind each fixed op.

    Attributes:
        until_us: by rank, the least time until the fixed op starts.
        since_us: by rank, the least time from the end of the fixed op to that of the step.
        whole_us: the whole step by this lane.
    """

    def __init__(self, lane: LaneLoad, facts: Precedence, compute: _Compute, slowest: float) -> None:
        count = len(facts.fixed)
        before, before_gain, behind, behind_gain, heads = ([0.0] * (count + 1) for _ in range(5))
        total_gain_us = 0.0
        heads_us = facts.heads_us if facts.fixed else {}  # which are counted beside what is fixed alone
        for job in lane.jobs:
            after, ended_before = facts.after[job.launch], facts.ended_before(job.launch)
            beside_us = facts.compute_us - compute.until_us(after) - compute.since_us(ended_before)
            gain_us = min(job.gain_us, job.gain * slowest * max(0.0, beside_us) / lane.speedup)
            before[ended_before] += job.time_us
            before_gain[ended_before] += gain_us
            _add(behind, after, job.time_us)
            _add(behind_gain, after, gain_us)
            head_us = heads_us.get(job.launch, 0.0)
            heads[after + 1] += head_us if lane.gain_per_us * head_us <= gain_us else 0.0
            total_gain_us += gain_us
        before_gain_us, behind_gain_us = np.cumsum(before_gain)[:-1], _suffix_sums(behind_gain)[:-1]
        self.until_us = _spans_us(lane, compute.before_us, np.cumsum(before)[:-1], before_gain_us)
        self.since_us = _spans_us(lane, compute.behind_us, _suffix_sums(behind)[:-1], behind_gain_us)
        # Fact 5: what the collectives before a fixed op, and those behind a later one, cannot gain for lack of compute. Heads
        # could be put off behind the fixed op, but not without loss.
        others_us = facts.compute_us - compute.own_us
        late_us = others_us - compute.before_us - np.cumsum(heads)[:-1]
        lost_before_us = before_gain_us - lane.gain_per_us * (others_us - compute.behind_us)
        most_before_us = np.maximum.accumulate(np.maximum(lost_before_us, 0.0))
        lost_us = most_before_us + np.maximum(behind_gain_us - lane.gain_per_us * late_us, 0.0)
        self.whole_us = lane.span_us(facts.compute_us, lane.total_us, total_gain_us - float(lost_us.max(initial=0.0)))


def _spans_us(lane: LaneLoad, compute_us: _Times, communication_us: _Times, gain_us: _Times) -> _Times:
    """:meth:`LaneLoad.span_us` of each rank."""
    return compute_us + communication_us - np.minimum(gain_us, lane.gain_per_us * compute_us)


def _floors(compute: _Compute, windows: Sequence[_LaneWindows]) -> list[float]:
    """By rank the least time until the fixed op starts."""
    return _largest([compute.issued_us, compute.before_us, *(window.until_us for window in windows)])


def _rests(compute: _Compute, windows: Sequence[_LaneWindows]) -> list[float]:
    """By rank the least time from the start of the fixed op to the end of the step."""
    return _largest([compute.own_us + us for us in (compute.behind_us, *(window.since_us for window in windows))])


def _largest(rows: Sequence[_Times]) -> list[float]:
    found: list[float] = np.maximum.reduce(rows).tolist()
    return found


def jackson_us(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Makespan of Jackson's preemptive schedule of ``(release, duration, tail)``: longest tail first.

    It equals the largest ``min release + sum of durations + min tail`` over all sets of jobs (Carlier, 1982).
    """
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, int]] = []
    remaining: list[float] = []
    now = longest_us = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, duration, tail = waiting.pop()
            heapq.heappush(ready, (-tail, len(remaining)))
            remaining.append(duration)
        tail, job = ready[0]
        end_us = now + remaining[job]
        if waiting and waiting[-1][0] < end_us:
            remaining[job] = end_us - waiting[-1][0]
            now = waiting[-1][0]
        else:
            heapq.heappop(ready)
            now = end_us
            longest_us = max(longest_us, now - tail)
    return longest_us


def _add(sums: list[float], index: int, value: float) -> None:
    """Add at ``index``; -1 stands for "behind nothing" and counts nowhere."""
    if index >= 0:
        sums[index] += value


def _suffix_sums(values: Sequence[float]) -> _Times:
    return np.cumsum(values[::-1])[::-1]
