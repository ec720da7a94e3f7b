"""The tests of gathers across the step's edge that two GPUs run, rehearsed on gloo."""

from __future__ import annotations

from tests.gpu.across_steps import rows


def test_nan_beside_gathers_across_the_edge_changes_nothing() -> None:
    found = rows("cpu", steps=3, names=("eager, ring, one by one", "eager, ring, with its backward"))
    assert len(found) == 2
    assert all(row.taken >= row.steps - 1 and row.fills for row in found)
    assert [row.differing for row in found] == [0, 0]
