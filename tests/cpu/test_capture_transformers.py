"""Models of Hugging Face transformers, from small configurations without a download, with their own loss.

Each trains for three AdamW steps on two gloo ranks, eager FSDP2 beside converted and compiled by ``overlap_eager``; losses,
gradients and parameters are compared bit for bit.

The attention mask hides something in every batch: without that, transformers' own code takes another attention kernel
when it is compiled than when it is not, and differs from itself. The mixture of experts is in its default form, a grouped
product over all experts; its other form, a loop over the experts that some token chose, reads parameters as often as the
data say and cannot be captured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, compare

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(name: str, policy: MixedPrecisionPolicy | None = None, **more: Any) -> nn.Module:
    """``name`` as in LlamaForCausalLM and LlamaConfig, sharded by layer."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    options = {} if policy is None else {"mp_policy": policy}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def sentences(model: nn.Module, number: int) -> tuple[Any, ...]:
    """Positional arguments of a causal language model: token ids, attention mask, and labels in the sixth place."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    ids = torch.randint(0, SIZES["vocab_size"], (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return (ids, mask, None, None, None, ids)


def own_loss(output: Any) -> Tensor:
    return output.loss


RECIPE = Recipe(batch=sentences, loss=own_loss)
MODELS = {
    "Llama": partial(build, "Llama"),
    "Llama in bf16, tied": partial(build, "Llama", BF16, tie_word_embeddings=True),
    "Qwen3": partial(build, "Qwen3", head_dim=8),
    "Mixtral": partial(build, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
}
RUNS = {name: partial(compare, model, RECIPE, "overlap_eager") for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0
