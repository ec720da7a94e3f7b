"""Recorded graphs of the benchmark: curves and recorded times are of one recorder, so they have to agree."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap_pass.graph.program import CollectiveKind
from tests.bench.graphs import files, read

JOINED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
"""What may be joined, and so is priced by a curve."""


@pytest.mark.skipif(not files(), reason="no recorded graphs beside the checkout")
@pytest.mark.parametrize("path", files(), ids=lambda path: path.name.split(".")[0])
def test_a_curve_gives_most_collectives_the_time_that_was_recorded(path: Path) -> None:
    recorded = read(path)
    shares: dict[tuple[CollectiveKind, str], list[float]] = {}
    for op in recorded.program.launches:
        if op.collective is not None and op.collective.kind in JOINED:
            on_curve_us = recorded._on_its_curve(op, op.collective)
            key = op.collective.kind, op.collective.group
            shares.setdefault(key, []).append(on_curve_us / recorded.costs.duration_us[op.name])
    assert shares
    for found in shares.values():
        assert sorted(found)[len(found) // 2] == pytest.approx(1.0, abs=0.25)
