"""A Llama-style decoder in plain torch: the model of the demo, the tests, the benchmarks and the planner's presets.

RMSNorm, rotary embedding, grouped-query attention, SwiGLU; the loss is inside, so that a training step is one call
and one graph. Nothing here knows about sharding but :func:`shard`, which wraps it the way people wrap their own models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from overlap_pass.errors import OptionError
from overlap_pass.spec import nearest

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PRESETS", "Llama", "LlamaConfig", "preset", "shard"]


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a decoder.

    Attributes:
        layers: number of decoder blocks.
        dim: width of the residual stream.
        heads, kv_heads: query heads, and the key/value heads that groups of them share.
        ffn_dim: inner width of the SwiGLU feed-forward.
        vocab_size: rows of the embedding and of the head.
        tied: the head uses the embedding's weight.
        max_tokens: longest sequence that the rotary tables cover.
        rope_base: base of the rotary frequencies.
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        OptionError: heads do not divide the width, or kv_heads do not divide heads.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocab_size: int
    tied: bool = False
    max_tokens: int = 8192
    rope_base: float = 500_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise OptionError(f"dim={self.dim} must be an even multiple of heads={self.heads}")
        if self.heads % self.kv_heads:
            raise OptionError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(layers=2, dim=64, heads=4, kv_heads=2, ffn_dim=176, vocab_size=256, max_tokens=256),
    "bench-1b": LlamaConfig(layers=16, dim=2048, heads=32, kv_heads=8, ffn_dim=8192, vocab_size=32768),
    "bench-2b": LlamaConfig(layers=8, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=32768),
    "llama3-8b": LlamaConfig(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=128256),
}


def preset(name: str) -> LlamaConfig:
    """The named shape.

    Raises:
        OptionError: unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise OptionError(f"model={name!r} is no preset: {nearest(name, PRESETS)}")
    return PRESETS[name]


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight``, the mean taken in fp32, the result in the dtype of ``x``."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


class Rotary(nn.Module):
    """Turns each pair ``(x[i], x[i + head_dim/2])`` at position ``t`` by the angle ``t * base**(-2i/head_dim)``.

    The product of two rotated vectors then depends on their positions only through the difference. The tables are
    fp32 buffers outside the state dict; all blocks share one module, so they exist once.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.base = config.rope_base
        shape = (config.max_tokens, config.head_dim // 2)
        self.register_buffer("cos", torch.empty(shape), persistent=False)
        self.register_buffer("sin", torch.empty(shape), persistent=False)

    def reset_parameters(self) -> None:
        positions, half = self.cos.shape
        exponent = torch.arange(half, device=self.cos.device, dtype=torch.float32) / half
        angle = torch.outer(torch.arange(positions, device=self.cos.device), self.base**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, heads, tokens, head_dim]; same shape and dtype out."""
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention; each key/value head serves ``heads / kv_heads`` query heads."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.rotary = rotary
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.rotary(self._heads(self.query(x)))
        key = self.rotary(self._heads(self.key(x)))
        value = self._heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream: the unit that is sharded."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config, rotary)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The decoder; ``model(tokens, targets)`` is the mean next-token loss, ``model.logits(tokens)`` what it is of.

    Built on the meta device it holds no memory: shard it, call ``to_empty(device=...)``, then ``reset_parameters()``.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Norms to one, every other weight normal with deviation 0.02, rotary tables filled."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, Rotary):
                module.reset_parameters()

    def logits(self, tokens: Tensor) -> Tensor:
        """``tokens``: [batch, tokens] of int64; returns [batch, tokens, vocab_size]."""
        if tokens.shape[-1] > self.config.max_tokens:
            raise OptionError(
                f"sequence of {tokens.shape[-1]} tokens is longer than max_tokens={self.config.max_tokens}"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """``tokens``, ``targets``: [batch, tokens] of int64; returns the mean cross entropy, taken in fp32."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1).float(), targets.flatten())


def shard(model: Llama, *, mesh: DeviceMesh | None = None, **options: Any) -> Llama:
    """``fully_shard`` each block, then the root (embedding, last norm, head), in place.

    Args:
        mesh: 1-D (FSDP) or 2-D (HSDP) device mesh; the default process group where ``None``.
        options: passed to ``fully_shard``: ``mp_policy``, ``reshard_after_forward``, …
    """
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model
