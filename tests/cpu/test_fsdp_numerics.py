"""A converted model computes what eager FSDP2 computes, bit for bit, on two gloo ranks.

Every case trains two copies for three AdamW steps: one under FSDP2 as torch has it, one converted (its optimizer is made
before the conversion), uncompiled or compiled with ``aot_eager`` in one graph. Losses, every gradient of every step and
the parameters at the end are compared with ``torch.equal`` on each rank. On two ranks a sum has one order, so there is
no tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from tests.cpu.models import TinyLlama, TinyLlamaConfig
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, compare, float_batch

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_ALL = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP16_REDUCE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)

# -- models


def llama(
    *,
    config: TinyLlamaConfig = TinyLlamaConfig(blocks=1),  # noqa: B008  frozen
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  frozen
    root_policy: MixedPrecisionPolicy | None = None,
    mesh: tuple[int, int] | None = None,
    ignored: str = "",
    **options: Any,
) -> nn.Module:
    torch.manual_seed(0)
    model = TinyLlama(config)
    if mesh is not None:
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard"))
    if ignored:
        options["ignored_params"] = {p for name, p in model.named_parameters() if ignored in name}
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=root_policy or policy, **options)


def frozen_llama() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("feed_forward" in name)
    return model


def grouped_llama() -> nn.Module:
    torch.manual_seed(0)
    model = TinyLlama(TinyLlamaConfig(blocks=1))
    fully_shard(model.blocks[0], mp_policy=BF16)
    fully_shard([model.norm, model.head], mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


def dividing_llama(factor: float, policy: MixedPrecisionPolicy = MixedPrecisionPolicy()) -> nn.Module:  # noqa: B008
    model = llama(policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    return model


def summing_llama() -> nn.Module:
    model = llama()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() == 2 and parameter.shape[1] % 2 == 0 else None


class Few(nn.Module):
    """Parameters with fewer rows than ranks, one that no step uses, and one that is read without being computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.one_row = nn.Parameter(torch.randn(1, 4))
        self.two_rows = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)
        self.only_its_dtype = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.two_rows(x.to(self.only_its_dtype.dtype) * self.one_row)


@dataclass
class Extra:
    shift: Tensor
    label: str


class Scale(nn.Module):
    """Computes in whatever dtype its inputs arrive in, so that a cast that is missing or too many changes bits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, pair: tuple[Tensor, list[Tensor]], *, extra: Extra) -> dict[str, Any]:
        x, (y,) = pair
        assert extra.label == "kept"
        return {"scaled": x * self.weight.to(x.dtype) + extra.shift, "aside": (y * 3, [y])}


class Doors(nn.Module):
    """Two units, the first casts its inputs and the second does not; tensors pass in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.casting, self.plain = Scale(7), Scale(7)

    def forward(self, x: Tensor) -> Tensor:
        first = self.casting((x, [x + 1]), extra=Extra(x * 2, "kept"))
        y, (z,) = first["aside"]
        second = self.plain((first["scaled"] + y, [z]), extra=Extra(x, "kept"))
        return second["scaled"] + second["aside"][0]


def doors(output_dtype: torch.dtype | None) -> nn.Module:
    torch.manual_seed(0)
    model = Doors()
    fully_shard(model.casting, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype, True))
    fully_shard(model.plain, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, False))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype))


def few() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(Few())


OUTPUT_FP32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
LLAMA = Recipe()

# Name -> what is built, how it is trained, and whether the case is compiled too (that takes seconds).
CASES: dict[str, tuple[Callable[[], nn.Module], Recipe, bool]] = {
    "fp32": (partial(llama, config=TinyLlamaConfig(blocks=2)), LLAMA, True),
    "bf16, reduced in fp32": (partial(llama, policy=BF16), LLAMA, True),
    "bf16, reduced in bf16": (partial(llama, policy=BF16_ALL), LLAMA, True),
    "output_dtype of the root": (partial(llama, policy=BF16, root_policy=OUTPUT_FP32), LLAMA, True),
    "cast_forward_inputs on and off": (partial(doors, None), Recipe(partial(float_batch, 7)), True),
    "output_dtype of a block": (partial(doors, torch.float64), Recipe(partial(float_batch, 7)), True),
    "reshard_after_forward True": (partial(llama, reshard_after_forward=True), LLAMA, False),
    "reshard_after_forward False": (partial(llama, reshard_after_forward=False), LLAMA, True),
    "HSDP, 2 replicas of 1 shard": (partial(llama, mesh=(2, 1), policy=BF16), LLAMA, True),
    "HSDP, 1 replica of 2 shards": (partial(llama, mesh=(1, 2), policy=BF16), LLAMA, False),
    "frozen parameters": (frozen_llama, LLAMA, True),
    "ignored parameters": (partial(llama, ignored="norm"), LLAMA, True),
    "accumulation over two batches": (llama, Recipe(accumulate=2), True),
    "tied weights": (partial(llama, config=TinyLlamaConfig(blocks=1, tied=True), policy=BF16), LLAMA, False),
    "clipped gradients": (llama, Recipe(clip=0.01), False),
    "sharded by columns": (partial(llama, shard_placement_fn=columns), LLAMA, True),
    "two modules in one unit": (grouped_llama, LLAMA, False),
    "few rows, unused parameters": (few, Recipe(partial(float_batch, 4)), True),
    "divided by the number of ranks": (partial(dividing_llama, 2.0), LLAMA, False),
    "sums only": (summing_llama, LLAMA, False),
    "reduced in fp16": (partial(llama, policy=FP16_REDUCE), LLAMA, False),
    "reduced in fp16, divided by 6": (partial(dividing_llama, 6.0, FP16_REDUCE), LLAMA, False),
}


RUNS = {
    f"{name}, {'compiled' if backend else 'uncompiled'}": partial(compare, build, recipe, backend)
    for name, (build, recipe, also_compiled) in CASES.items()
    for backend in ((None, "aot_eager") if also_compiled else (None,))
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0
