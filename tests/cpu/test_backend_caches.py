"""Torch's compile caches and the plan: what is out of a cache was planned as this call would plan it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard

from overlap_pass.report import jsonfile
from tests.cpu.ranks import Outcome, fake_ranks, run_cases
from tests.cpu.test_backend_numerics import watched_plans
from tests.cpu.training import Recipe, adamw, differences, float_batch, train


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
    assert plans(launch_order="priced") == 2
    assert plans(pure_namespaces=["mylib"]) == 2
    assert plans(memory_budget="unlimited") == 0
    assert plans(launch_order="free") == 2
    assert plans(communicators_in_flight=1) == 2
    assert plans(save_plan=tmp_path / "plans") == 2, "a graph out of a cache has no plan to save"
    report = tmp_path / "report.json"
    assert plans(report=report) == 2
    assert len(jsonfile.loads(report.read_text(encoding="utf-8")).before.stats.per_collective) > 0


def cold_then_warm() -> tuple[list[str], int, int]:
    """Both ranks use one cache directory; shards differ in size, and so do the ranks' graphs."""
    trained, planned = [], []
    for _ in range(2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
        optimizer = adamw(model)
        call = torch.compile(model, backend="overlap", fullgraph=True)
        with watched_plans() as found:
            trained.append(train(model, optimizer, Recipe(partial(float_batch, 4), steps=2), call=call))
        planned.append(len(found))
        dist.barrier()
    cold, warm = planned
    return differences(*trained), cold, warm


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}):
        return run_cases({"shared": cold_then_warm}, ranks=2)


def test_ranks_that_share_a_warm_cache_compute_what_they_computed_cold(outcomes: dict[str, Outcome]) -> None:
    for wrong, cold, warm in outcomes["shared"].values():
        assert wrong == []
        assert (cold, warm) == (2, 0)
