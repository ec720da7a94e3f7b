"""On two GPUs: gathers across the step's edge change no bit, and stale ones stop the device (see ``tests.gpu.across_steps``)."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cpu.ranks import run_cases
from tests.gpu.across_steps import CASES, Row, rows, written_by_data


@pytest.fixture(scope="module")
def found() -> list[Row]:
    return rows("cuda", steps=30)


def test_losses_and_parameters_have_the_bits_of_a_loop_without(found: list[Row]) -> None:
    assert len(found) == len(CASES)
    assert all(row.taken >= row.steps - 1 and row.fills for row in found)
    assert [row for row in found if row.differing] == []


def test_a_write_that_changes_no_version_stops_the_device() -> None:
    outcome = run_cases({"data": partial(written_by_data, "cuda")}, ranks=2, limit_s=120)["data"]
    for said in outcome.values():
        assert "assert" in said
