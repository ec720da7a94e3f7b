"""Intervals against what theory says of them, and against a scan over all sign patterns."""

from __future__ import annotations

import random
from itertools import product
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.errors import PlanError
from overlap_pass.report.significance import least_rounds, location, ratio

durations = st.lists(st.floats(1.0, 1e6), min_size=1, max_size=12)


def test_six_observations_give_their_whole_range_with_97_percent() -> None:
    """The signed-rank test of six values can reject at 2 · 2⁻⁶ at best, when all lie on one side."""
    found = location([3.0, 1.0, 4.0, 1.5, 9.0, 2.6])
    assert (found.low, found.high) == (1.0, 9.0)
    assert found.confidence == pytest.approx(1 - 2 / 64)
    assert least_rounds() == 6


def test_the_estimate_is_the_median_of_all_means_of_two() -> None:
    assert location([1.0, 2.0, 10.0]).value == median([1.0, 1.5, 5.5, 2.0, 6.0, 10.0])


def test_the_interval_holds_the_centres_that_the_signed_rank_test_does_not_reject() -> None:
    """For nine values, the test is done by counting all 2⁹ signs of their ranks."""
    values = [0.7, 1.9, 2.2, 3.1, 4.6, 5.4, 6.5, 8.3, 9.8]
    found = location(values)
    sums = [sum(rank for rank, up in enumerate(signs, 1) if up) for signs in product((0, 1), repeat=len(values))]

    def p_value(centre: float) -> float:
        ranked = sorted((value - centre for value in values), key=abs)
        up = sum(rank for rank, value in enumerate(ranked, 1) if value > 0)
        few = min(up, len(values) * (len(values) + 1) // 2 - up)
        return min(1.0, 2 * sum(one <= few for one in sums) / len(sums))

    for inside in (found.low + 1e-6, found.value, found.high - 1e-6):
        assert p_value(inside) > 1 - found.confidence
    for outside in (found.low - 1e-6, found.high + 1e-6):
        assert p_value(outside) <= 1 - found.confidence + 1e-12


def test_intervals_cover_as_often_as_they_say() -> None:
    """400 experiments with a known centre; the share covered has a standard error of 1 %."""
    noise = random.Random(0)
    intervals = [location([5.0 + noise.gauss(0, 1) for _ in range(8)]) for _ in range(400)]
    covered = sum(one.low <= 5.0 <= one.high for one in intervals) / len(intervals)
    assert covered == pytest.approx(intervals[0].confidence, abs=0.035)


def test_of_twelve_rounds_one_may_go_astray() -> None:
    steady = [[100.0 + turn, 101.0 + turn] for turn in range(12)]
    faster = [[0.9 * step for step in block] for block in steady]
    faster[3] = [500.0, 510.0]
    found = ratio(faster, steady)
    assert found.value == pytest.approx(0.9, abs=0.01)
    assert found.high < 1


@given(durations)
def test_a_system_is_exactly_as_fast_as_itself(values: list[float]) -> None:
    blocks = [[value] for value in values]
    found = ratio(blocks, blocks)
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)


@given(durations, st.floats(0.5, 2.0))
def test_a_slow_drift_of_the_machine_cancels(values: list[float], factor: float) -> None:
    found = ratio([[factor * value] for value in values], [[value] for value in values])
    assert found.low == pytest.approx(factor)
    assert found.high == pytest.approx(factor)


@given(durations)
def test_the_estimate_lies_in_its_interval(values: list[float]) -> None:
    found = location(values)
    assert min(values) <= found.low <= found.value <= found.high <= max(values)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(PlanError, match="at least one round"):
        location([])
