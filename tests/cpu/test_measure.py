"""Systems side by side on two CPU ranks: who is measured, what is compared, and that all ranks agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import overlap_pass
from overlap_pass.profiling.measure import Effort, measure
from overlap_pass.profiling.unsharded import compute_only
from overlap_pass.profiling.variants import BASELINES, Variant
from overlap_pass.report.verification import SystemKind
from tests.cpu.ranks import run_cases

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3, bias=False))


def sharded(policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    model = plain()
    for part in (model[0], model[2], model):
        fully_shard(part, mp_policy=policy or MixedPrecisionPolicy())
    return model


def batch() -> Tensor:
    torch.manual_seed(1 + dist.get_rank())
    return torch.randn(4, 8)


def step(run: Any, inputs: Tensor) -> Tensor:
    loss = run(inputs).float().pow(2).mean()
    loss.backward()
    return loss.detach()


def make_step() -> tuple[nn.Module, Any, tuple[Tensor]]:
    return sharded(), step, (batch(),)


def eager_schedule(model: nn.Module) -> nn.Module:
    overlap_pass.make_traceable(model).compile(backend="overlap_eager", dynamic=False)
    return model


def fails_on_rank_1(model: nn.Module) -> nn.Module:
    if dist.get_rank() == 1:
        raise RuntimeError("this pass does not know the graph\nand says so at length")
    return model


def unsharded(model: nn.Module) -> Any:
    model.compile = lambda **_: None  # type: ignore[method-assign, assignment]
    return compute_only(model)


VARIANTS = (
    BASELINES["fsdp2"],
    Variant("peer", fails_on_rank_1),
    Variant("compute-only", unsharded, SystemKind.FLOOR),
    Variant("overlap", eager_schedule, SystemKind.SCHEDULED, bitwise_with="fsdp2"),
)


def measured() -> dict[str, Any]:
    effort = Effort(warm_up=1, rounds=2, steps=2, profiled=0)
    found = measure(make_step, VARIANTS, effort, device=torch.device("cpu"))
    return {
        "systems": {system.name: system for system in found.systems},
        "left out": [(one.name, one.reason) for one in found.left_out],
    }


def gradients_without_sharding() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the unsharded model and of one that never was sharded, on the same batch."""
    model, reference = sharded(), plain()
    step(unsharded(model), batch())
    step(reference, batch())
    return tuple({name: p.grad for name, p in one.named_parameters()} for one in (model, reference))  # type: ignore[return-value]


def dtypes_without_sharding() -> list[torch.dtype]:
    """Parameters, and the dtype that comes out for float32 inputs."""
    model = sharded(BF16)
    run = unsharded(model)
    return [*(parameter.dtype for parameter in model.parameters()), run(batch()).dtype]


CASES = {"measured": measured, "gradients": gradients_without_sharding, "dtypes": dtypes_without_sharding}


@pytest.fixture(scope="module")
def outcomes():
    return run_cases(CASES, ranks=2)


def test_all_ranks_have_the_same_figures(outcomes) -> None:
    first, second = (value["systems"] for value in outcomes["measured"].values())
    assert list(first) == list(second) == ["fsdp2", "compute-only", "overlap"]
    for name, system in first.items():
        assert [len(block) for block in system.blocks_us] == [2, 2]
        assert system.blocks_us == second[name].blocks_us


def test_a_system_that_fails_on_one_rank_is_left_out_on_all_with_the_first_line_of_the_reason(outcomes) -> None:
    for value in outcomes["measured"].values():
        assert value["left out"] == [("peer", "RuntimeError: this pass does not know the graph")]


def test_numbers_are_compared_over_the_shards_of_all_ranks(outcomes) -> None:
    for value in outcomes["measured"].values():
        agreement = value["systems"]["overlap"].agreement
        assert agreement.reference == "fsdp2"
        assert agreement.exact
        assert agreement.gradients == 2 * 3, "three parameters on two ranks"
        assert value["systems"]["compute-only"].agreement is None, "its gradients are those of its own batch"


def test_what_the_backend_planned_stands_beside_what_was_measured(outcomes) -> None:
    for value in outcomes["measured"].values():
        assert value["systems"]["fsdp2"].predicted is None
        predicted = value["systems"]["overlap"].predicted
        kinds = [span.collective for span in predicted.side.timeline.spans if span.collective is not None]
        assert kinds.count("all_gather") >= 2
        assert "reduce_scatter" in kinds


def test_compute_only_gives_the_gradients_of_the_model_that_never_was_sharded(outcomes) -> None:
    for without, reference in outcomes["gradients"].values():
        assert without.keys() == reference.keys()
        assert all(torch.equal(without[name], reference[name]) for name in reference)


def test_compute_only_computes_in_the_dtype_of_the_policy(outcomes) -> None:
    for dtypes in outcomes["dtypes"].values():
        assert set(dtypes) == {torch.bfloat16}
