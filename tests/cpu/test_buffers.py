"""The tests of buffers that two GPUs run, rehearsed on gloo."""

from __future__ import annotations

import pytest

from tests.gpu.buffers import Row, rows


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows("cpu", repetitions=2, iterations=5)


def test_nan_beside_running_collectives_changes_nothing(found: list[Row]) -> None:
    beside = [row for row in found if row.what.startswith("NaN beside")]
    assert len(beside) == 3
    assert all(row.fills >= 100 for row in beside)
    assert [row for row in beside if row.differing] == []


def test_two_communicators_give_the_same_bits_every_time(found: list[Row]) -> None:
    assert [row.differing for row in found if row.what == "two communicators"] == [0]
