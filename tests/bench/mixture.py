"""A decoder with a mixture of experts in each block: what the live bench traces for all-to-alls.

Sizes are DeepSeekMoE-16B's (Dai et al., 2024: 28 blocks of width 2048, 64 experts of which 6 are chosen, and two that all
tokens go to), with an expert block in every layer. Each rank of an expert-parallel group holds its share of the experts; tokens
go there and come back by an all-to-all. A buffer of fixed capacity per expert keeps shapes static, as in GShard; what does
not fit is dropped.

Parameters of experts are sharded over the ranks that hold the same ones, everything else over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from overlap_pass.profiling import llama

__all__ = ["DEEPSEEK_16B", "Meshes", "MixtureConfig", "mixture"]


@dataclass(frozen=True, slots=True)
class MixtureConfig:
    """Shape of the model.

    Attributes:
        decoder: everything but the experts; its feed-forward is the expert that all tokens go to.
        experts: in each block, over all ranks of an expert-parallel group.
        chosen: experts that a token goes to.
        expert_dim: inner width of an expert.
        slack: capacity of an expert over its share if all were chosen alike.
    """

    decoder: llama.LlamaConfig
    experts: int
    chosen: int
    expert_dim: int
    slack: float = 1.25


DEEPSEEK_16B = MixtureConfig(
    llama.LlamaConfig(layers=28, dim=2048, heads=16, kv_heads=16, ffn_dim=2 * 1408, vocab_size=102400),
    experts=64,
    chosen=6,
    expert_dim=1408,
)


@dataclass(frozen=True, slots=True)
class Meshes:
    """Who shares what.

    Attributes:
        everyone: all ranks, in one dimension.
        alike: the ranks that hold the same experts as this one.
        experts: the expert-parallel group of this rank.
    """

    everyone: DeviceMesh
    alike: DeviceMesh
    experts: DeviceMesh


class Experts(nn.Module):
    """This rank's experts: SwiGLU each, as batched matmuls over ``[experts here, rows, dim]``."""

    def __init__(self, here: int, dim: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(here, dim, inner))
        self.up = nn.Parameter(torch.empty(here, dim, inner))
        self.down = nn.Parameter(torch.empty(here, inner, dim))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down)


class Mixture(nn.Module):
    """The expert that all tokens go to, and those that the router chooses."""

    def __init__(self, config: MixtureConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.config, self.group, self.ranks = config, group, group.size()
        dim = config.decoder.dim
        self.shared = llama.FeedForward(config.decoder)
        self.router = nn.Linear(dim, config.experts, bias=False)
        self.routed = Experts(config.experts // self.ranks, dim, config.expert_dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, slots, capacity = self._route(tokens)
        chosen = self.config.chosen
        source = torch.arange(slots.shape[0], device=x.device) // chosen
        rows = tokens.new_zeros(self.config.experts * capacity + 1, tokens.shape[-1])
        rows = rows.index_add(0, slots, tokens.index_select(0, source))
        back = self._to_experts_and_back(rows[:-1], capacity)
        back = torch.cat([back, back.new_zeros(1, back.shape[-1])])
        summed = (back.index_select(0, slots) * weights[:, None]).unflatten(0, (-1, chosen)).sum(1)
        return self.shared(x) + summed.view_as(x)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor, int]:
        """For each token and choice its weight and its row among those that are sent; the last row is for what does not fit."""
        config = self.config
        capacity = int(config.slack * tokens.shape[0] * config.chosen / config.experts)
        scores = self.router(tokens).float().softmax(-1)
        weights, experts = scores.topk(config.chosen, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype).flatten()
        experts = experts.flatten()
        is_for = (experts[:, None] == torch.arange(config.experts, device=tokens.device)).to(torch.int32)
        place = (is_for.cumsum(0) * is_for).sum(-1) - 1
        slots = torch.where(place < capacity, experts * capacity + place, config.experts * capacity)
        return weights, slots, capacity

    def _to_experts_and_back(self, rows: Tensor, capacity: int) -> Tensor:
        """``rows``: [experts · capacity, dim], by expert; the same rows, each through its expert."""
        sizes = (self.ranks, self.config.experts // self.ranks, capacity)
        there = all_to_all_single_autograd(rows, None, None, self.group)
        done = self.routed(there.unflatten(0, sizes).transpose(0, 1).flatten(1, 2))
        back = done.unflatten(1, (self.ranks, capacity)).transpose(0, 1).flatten(0, 2)
        return all_to_all_single_autograd(back, None, None, self.group)


def mixture(config: MixtureConfig, meshes: Meshes, tokens: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The sharded model and its inputs, sequences of at most 4096 tokens: one training step is ``model(*inputs)``."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    length = min(tokens, 4096)
    model = llama.Llama(replace(config.decoder, max_tokens=length))
    for block in model.blocks:
        block.feed_forward = Mixture(config, meshes.experts.get_group())
        fully_shard(block.feed_forward.routed, mesh=meshes.alike, mp_policy=policy)
        fully_shard(block, mesh=meshes.everyone, mp_policy=policy)
    fully_shard(model, mesh=meshes.everyone, mp_policy=policy)
    batch = torch.zeros((tokens // length, length), dtype=torch.long)
    return model, (batch, batch)
