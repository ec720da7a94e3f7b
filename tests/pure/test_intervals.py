"""Interval arithmetic against the plainest thing that can be right: a set of whole nanoseconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.timeline.intervals import Cover, Interval, difference, intersection, total_ns, union

RAW = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def bitmap(intervals: list[Interval]) -> set[int]:
    return {time for start, end in intervals for time in range(start, end)}


def is_a_set(intervals: list[Interval]) -> bool:
    """Sorted, disjoint, not touching, none empty."""
    ends = [-1, *(end for _, end in intervals)]
    return all(ends[i] < start < end for i, (start, end) in enumerate(intervals))


@given(RAW)
def test_a_union_covers_what_any_interval_covers(raw: list[Interval]) -> None:
    merged = union(raw)
    assert is_a_set(merged)
    assert bitmap(merged) == bitmap(raw)


@given(RAW, RAW)
def test_intersection_and_difference_split_a_set_as_bitmaps_do(
    raw_first: list[Interval], raw_second: list[Interval]
) -> None:
    first, second = union(raw_first), union(raw_second)
    common, rest = intersection(first, second), difference(first, second)
    assert is_a_set(common)
    assert is_a_set(rest)
    assert bitmap(common) == bitmap(first) & bitmap(second)
    assert bitmap(rest) == bitmap(first) - bitmap(second)
    assert total_ns(common) + total_ns(rest) == total_ns(first)


@given(RAW, st.integers(-5, 45), st.integers(0, 50))
def test_a_cover_counts_the_covered_time_of_any_stretch(raw: list[Interval], start: int, length: int) -> None:
    stretch = set(range(start, start + length))
    assert Cover(union(raw)).within_ns(start, start + length) == len(bitmap(raw) & stretch)


def test_half_open_intervals_that_touch_are_one() -> None:
    assert union([(5, 8), (0, 5)]) == [(0, 8)]
    assert intersection([(0, 5)], [(5, 8)]) == []


def test_nanoseconds_since_1970_stay_exact() -> None:
    epoch = 1_767_225_600_000_000_000
    assert total_ns(difference([(epoch, epoch + 10)], [(epoch + 3, epoch + 4)])) == 9
