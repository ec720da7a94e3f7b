"""Torch's compile caches and the plan: what is out of a cache was planned as this call would plan it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard

from overlap_pass.report import jsonfile
from tests.cpu.ranks import fake_ranks
from tests.cpu.test_backend_numerics import watched_plans


@pytest.fixture(scope="module", autouse=True)
def one_cache() -> Iterator[None]:
    with fresh_cache(), fake_ranks(2):
        yield


def plans(*, reshard: bool = True, **options: Any) -> int:
    """How many graphs are planned anew when a model is compiled as in a process of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 6), reshard_after_forward=reshard)
    with watched_plans() as found:
        torch.compile(model, backend="overlap", fullgraph=True, options=options)(torch.ones(2, 4)).sum().backward()
    return len(found)


def test_the_same_call_finds_its_graphs_and_another_one_does_not(tmp_path: Path) -> None:
    """One test, as each line meets what those before have left."""
    assert plans() == 2
    assert plans() == 0
    assert plans(memory_budget="unlimited") == 2
    assert plans(strategy="latest_start{margin=2}") == 2
    assert plans(hardware="a100") == 2
    assert plans(reshard=False) == 2
    assert plans(memory_budget="unlimited") == 0
    report = tmp_path / "report.json"
    assert plans(report=report) == 2
    assert len(jsonfile.loads(report.read_text(encoding="utf-8")).before.stats.per_collective) > 0
