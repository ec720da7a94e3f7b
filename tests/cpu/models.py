"""A Llama-style model, tiny and awkward: sizes that no number of ranks divides, so that padding is always in play.

Plain, or under ``fully_shard`` per block and at the root; and what there is to see of a model from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp import fully_shard

__all__ = ["Block", "TinyLlama", "TinyLlamaConfig", "footprint", "sharded_llama", "tokens"]


@dataclass(frozen=True, slots=True)
class TinyLlamaConfig:
    vocabulary: int = 67
    width: int = 32
    hidden: int = 95
    heads: int = 4
    key_heads: int = 2
    blocks: int = 2
    tied: bool = False
    bias: bool = True
    """Llama has none; here the query projection has one, so that 1-D parameters other than norms are covered."""


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.heads, self.key_heads = config.heads, config.key_heads
        size = config.width // config.heads
        self.query = nn.Linear(config.width, config.heads * size, bias=config.bias)
        self.key = nn.Linear(config.width, config.key_heads * size, bias=False)
        self.value = nn.Linear(config.width, config.key_heads * size, bias=False)
        self.out = nn.Linear(config.heads * size, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(x).view(batch, length, self.key_heads, -1).transpose(1, 2)
        value = self.value(x).view(batch, length, self.key_heads, -1).transpose(1, 2)
        repeat = self.heads // self.key_heads
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: TinyLlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class TinyLlama(nn.Module):
    """tokens (batch, length) of integers -> logits (batch, length, vocabulary)."""

    def __init__(self, config: TinyLlamaConfig | None = None) -> None:
        super().__init__()
        config = config or TinyLlamaConfig()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.register_buffer("scale", torch.ones(1))
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tokens(config: TinyLlamaConfig, *, seed: int, batch: int = 2, length: int = 8) -> Tensor:
    """Random token ids (batch, length), the same for the same seed on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocabulary, (batch, length), generator=generator)


def sharded_llama(config: TinyLlamaConfig | None = None, **options: Any) -> TinyLlama:
    """Under ``fully_shard(..., **options)``, each block and the root; the same weights on every call."""
    torch.manual_seed(0)
    model = TinyLlama(config)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def footprint(model: nn.Module) -> list[Any]:
    """All that a conversion could touch, to compare: classes, hooks in their order, attributes, FSDP2's states and marks."""
    seen: list[Any] = []
    for module in model.modules():
        seen.append((type(module), sorted(module.__dict__), _get_module_state(module)))
        for name, hooks in sorted(module.__dict__.items()):
            if "hooks" in name and hooks is not None:
                seen.append((name, list(hooks.items())))
        seen += [(name, id(parameter)) for name, parameter in module._parameters.items()]
        seen.append([module.__dict__.get(name) for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params")])
    return seen
