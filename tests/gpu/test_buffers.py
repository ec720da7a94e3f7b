"""On two GPUs: nothing that a running collective reads or writes is handed out again (see ``tests.gpu.buffers``)."""

from __future__ import annotations

import pytest

from tests.gpu.buffers import Row, rows


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows("cuda", repetitions=20, iterations=500)


def test_nan_of_the_same_size_never_arrives(found: list[Row]) -> None:
    beside = [row for row in found if row.fills]
    assert {row.allocator for row in beside} == {"", "expandable_segments:True"}
    assert [row for row in beside if row.differing] == []


def test_two_communicators_beside_matrix_products_give_the_same_bits_every_time(found: list[Row]) -> None:
    assert [row.differing for row in found if row.what == "two communicators"] == [0, 0]
