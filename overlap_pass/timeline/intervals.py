"""Exact arithmetic on sets of half-open integer intervals ``[start, end)``, in linear time.

A *set* is a sequence of intervals that is sorted, disjoint, without touching neighbours and without empty members:
:func:`union` makes one of anything, the other functions take and return sets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

__all__ = ["Cover", "Interval", "difference", "intersection", "total_ns", "union"]

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The set that covers exactly what any of ``intervals`` covers; empty and reversed ones cover nothing.

    Linear when the intervals come sorted by their start, as they do from a timeline.

    >>> union([(5, 9), (0, 2), (2, 3), (7, 7)])
    [(0, 3), (5, 9)]
    """
    ordered = sorted([interval for interval in intervals if interval[0] < interval[1]])
    if not ordered:
        return []
    merged: list[Interval] = []
    left, right = ordered[0]
    for start, end in ordered:
        if start > right:
            merged.append((left, right))
            left, right = start, end
        elif end > right:
            right = end
    merged.append((left, right))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What both sets cover.

    >>> intersection([(0, 5), (8, 12)], [(3, 9)])
    [(3, 5), (8, 9)]
    """
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        (start, end), (other_start, other_end) = first[i], second[j]
        if end < other_end:
            i += 1
        else:
            j += 1
            end = other_end
        if start < other_start:
            start = other_start
        if start < end:
            common.append((start, end))
    return common


def difference(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """What the first set covers and the second does not.

    >>> difference([(0, 10)], [(2, 4), (9, 20)])
    [(0, 2), (4, 9)]
    """
    rest: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if start < second[k][0]:
                rest.append((start, second[k][0]))
            start = second[k][1]
            k += 1
        if start < end:
            rest.append((start, end))
        # The last interval met may reach into the next member of ``first``.
        j = max(j, k - 1)
    return rest


def total_ns(intervals: Iterable[Interval]) -> int:
    """Summed length of a set.

    >>> total_ns([(0, 3), (5, 9)])
    7
    """
    return sum(end - start for start, end in intervals)


class Cover:
    """Answers how much of any stretch of time a set covers, in logarithmic time after linear preparation."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._starts = [start for start, _ in intervals]
        self._ends = [end for _, end in intervals]
        self._before = [0, *accumulate(end - start for start, end in intervals)]

    def before_ns(self, time_ns: int) -> int:
        """Length of what the set covers of ``(-∞, time_ns)``."""
        begun = bisect_right(self._starts, time_ns)
        if begun == 0:
            return 0
        return self._before[begun] - max(0, self._ends[begun - 1] - time_ns)

    def within_ns(self, start_ns: int, end_ns: int) -> int:
        """Length of what the set covers of ``[start_ns, end_ns)``.

        >>> Cover([(0, 3), (5, 9)]).within_ns(2, 7)
        3
        """
        return self.before_ns(end_ns) - self.before_ns(start_ns)
