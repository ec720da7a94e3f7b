"""Four gloo ranks in two dimensions: replicas of shards (HSDP), and shards of tensor-parallel parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, compare, float_batch

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class TwoLayers(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def replicated() -> nn.Module:
    """Nine and seven rows over two shards, times two replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(TwoLayers(7, 9), TwoLayers(7, 9))
    for layers in model:
        fully_shard(layers, mesh=mesh, mp_policy=BF16)
    return fully_shard(model, mesh=mesh, mp_policy=BF16)


def tensor_parallel(policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> nn.Module:  # noqa: B008  frozen
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(TwoLayers(6, 8), TwoLayers(6, 8))
    for layers in model:
        parallelize_module(layers, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layers, mesh=mesh["data"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=policy)


def same_on_a_data_rank(model: nn.Module, number: int) -> tuple[Any, ...]:
    """Ranks of one tensor-parallel group see the same batch."""
    generator = torch.Generator().manual_seed(number)
    return (torch.randn(3, 6, generator=generator),)


REPLICATED = Recipe(partial(float_batch, 7))
TENSOR_PARALLEL = Recipe(same_on_a_data_rank)

RUNS = {
    "HSDP, uncompiled": partial(compare, replicated, REPLICATED, None),
    "HSDP, compiled": partial(compare, replicated, REPLICATED, "aot_eager"),
    "FSDP of TP, uncompiled": partial(compare, tensor_parallel, TENSOR_PARALLEL, None),
    "FSDP of TP, compiled": partial(compare, tensor_parallel, TENSOR_PARALLEL, "aot_eager"),
    "FSDP of TP in bf16, uncompiled": partial(compare, partial(tensor_parallel, BF16), TENSOR_PARALLEL, None),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=4)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0
