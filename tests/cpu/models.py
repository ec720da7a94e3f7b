"""A Llama-style model, tiny and awkward: sizes that no number of ranks divides, so that padding is always in play."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Block", "TinyLlama", "TinyLlamaConfig", "tokens"]


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
