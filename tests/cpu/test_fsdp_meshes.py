"""Four gloo ranks in two dimensions: replicas of shards (HSDP), and shards of tensor-parallel parameters.

Each collective runs between two ranks, which have one order to add in: every bit is that of eager FSDP2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from compile_backends import compilation
from overlap_pass.graph.program import Category, CollectiveKind, Phase, Program
from overlap_pass.planning import Plan
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.test_backend_numerics import SLOW, against_eager_fsdp2
from tests.cpu.test_backend_numerics import Case as ScheduledCase
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


def overlap_of_reductions() -> list[tuple[str, str, int]]:
    """Of each launch in the planned backward, in order: kind, group, and how many products run before its wait."""
    found: list[tuple[str, str, int]] = []
    original = compilation.make_plan

    def watched(program: Program, *args: Any, **options: Any) -> Plan:
        plan = original(program, *args, **options)
        if program.phase is Phase.BACKWARD:
            found.extend(_products_behind_launches(plan))
        return plan

    compilation.make_plan = watched
    try:
        settings = {"hardware": SLOW, "memory_budget": "unlimited", "coalesce": "off"}
        model = torch.compile(replicated(), backend="overlap_eager", fullgraph=True, options=settings)
        model(*float_batch(7, model, 0)).float().sum().backward()
    finally:
        compilation.make_plan = original
    return found


def _products_behind_launches(plan: Plan) -> list[tuple[str, str, int]]:
    program, order = plan.program, plan.schedule.order
    at = {name: position for position, name in enumerate(order)}
    products = [at[op.name] for op in program.ops if op.category is Category.MATMUL]
    rows = []
    for launch in sorted(program.launches, key=lambda op: at[op.name]):
        wait = min(at[name] for name in program.waits_of[launch.name])
        behind = sum(at[launch.name] < position < wait for position in products)
        rows.append((launch.collective.kind.value, launch.collective.group, behind))
    return rows


REPLICATED = Recipe(partial(float_batch, 7))
TENSOR_PARALLEL = Recipe(same_on_a_data_rank)
ONCE = Recipe(partial(float_batch, 7), accumulate=2, reduced="once", steps=2)
ALL_REDUCED_ONCE = Recipe(partial(float_batch, 7), accumulate=2, reduced="all-reduce once", steps=2)

RUNS = {
    "HSDP, uncompiled": partial(compare, replicated, REPLICATED, None),
    "HSDP, compiled": partial(compare, replicated, REPLICATED, "aot_eager"),
    "HSDP, reduced once": partial(compare, replicated, ONCE, "overlap_eager"),
    "HSDP, all-reduced once": partial(compare, replicated, ALL_REDUCED_ONCE, "overlap_eager"),
    "FSDP of TP, uncompiled": partial(compare, tensor_parallel, TENSOR_PARALLEL, None),
    "FSDP of TP, compiled": partial(compare, tensor_parallel, TENSOR_PARALLEL, "aot_eager"),
    "FSDP of TP in bf16, uncompiled": partial(compare, partial(tensor_parallel, BF16), TENSOR_PARALLEL, None),
}
UNLIMITED = {"memory_budget": "unlimited"}
SCHEDULED = {
    "HSDP": ScheduledCase(replicated, UNLIMITED, REPLICATED),
    "FSDP of TP": ScheduledCase(tensor_parallel, UNLIMITED, TENSOR_PARALLEL),
    "FSDP of TP in bf16": ScheduledCase(partial(tensor_parallel, BF16), UNLIMITED, TENSOR_PARALLEL),
}
OVERLAP = "overlap of reductions"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    scheduled = {f"{name}, scheduled": partial(against_eager_fsdp2, case) for name, case in SCHEDULED.items()}
    return run_cases({**RUNS, **scheduled, OVERLAP: overlap_of_reductions}, ranks=4, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0


@pytest.mark.parametrize("name", SCHEDULED)
def test_the_numbers_stay_where_collectives_move_and_all_ranks_agree_on_the_order(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    found = outcomes[f"{name}, scheduled"].values()
    for rank, of_rank in enumerate(found):
        assert of_rank.wrong == [], f"rank {rank}"
        assert of_rank.nonzero_gradients > 0
    launches = [[plan.launches for plan in of_rank.plans] for of_rank in found]
    assert launches[0]
    assert all(of_rank == launches[0] for of_rank in launches)
    assert any(plan.moved for plan in found[0].plans)


def test_all_reduces_over_replicas_run_beside_compute_in_one_order_on_all_ranks(outcomes: dict[str, Outcome]) -> None:
    """As written, each is waited for at once. Those of the unit that backward comes to last have little to run beside."""
    rows = outcomes[OVERLAP].values()
    assert all(of_rank == rows[0] for of_rank in rows)
    of_kind = {kind: [behind for found, _, behind in rows[0] if found == kind] for kind in CollectiveKind}
    assert len(of_kind[CollectiveKind.ALL_REDUCE]) == len(of_kind[CollectiveKind.REDUCE_SCATTER]) == 8
    assert sum(behind > 0 for behind in of_kind[CollectiveKind.ALL_REDUCE]) >= 2
    groups = {kind: {group for found, group, _ in rows[0] if found == kind} for kind in CollectiveKind}
    assert not groups[CollectiveKind.ALL_REDUCE] & groups[CollectiveKind.REDUCE_SCATTER]
