"""Random FSDP2 models: what people write between two collectives, drawn from a seed.

Everything is drawn before anything is built, so that every rank, eager and compiled, gets the same model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

__all__ = ["Drawn", "draw"]

_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, reduced in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, fp32 out": MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32),
}
_STRATEGIES = (
    "latest_start",
    "latest_start",
    "greedy",
    "fill_gaps",
    "backward_pre",
    "backward_post",
    "local_search{evaluations=20}",
)
_BUDGETS = ("fsdp2", "unlimited", "unlimited", "+0B", "+1KiB", "1.1x")


# -- what happens to an activation in a block: value and hidden width → value


def _dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


def _noise(x: Tensor) -> Tensor:
    return x + 0.1 * torch.rand_like(x)


def _in_place(x: Tensor) -> Tensor:
    y = x * 1.5
    return y.add_(0.25).tanh_()


def _write_through_a_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, ::2].mul_(0.5)
    y.t()[0].add_(1.0)
    return y


def _read_before_write(x: Tensor) -> Tensor:
    y = x + 1.0
    before = y.sum(-1, keepdim=True)
    y.mul_(2.0)
    return y + before * 0.01


def _halves_exchanged(x: Tensor) -> Tensor:
    first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return torch.cat([second, first], 1)


def _transposed(x: Tensor) -> Tensor:
    return torch.tanh(x.t().contiguous()).t()


def _without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = 1.0 / (1.0 + x.abs().mean())
    return x * scale + x.detach() * 0.1


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.float(), -1).to(x.dtype) + x


def _mixed_rows(x: Tensor) -> Tensor:
    return torch.softmax(x @ x.t(), -1) @ x


SPICES: tuple[Callable[[Tensor], Tensor], ...] = (
    _dropout, _noise, _in_place, _write_through_a_view, _read_before_write, _halves_exchanged, _transposed,
    _without_gradient, _softmax, _mixed_rows,
)  # fmt: skip


class _Block(nn.Module):
    """Norm or none, up, spices, down, a residual or none."""

    def __init__(self, width: int, draws: random.Random) -> None:
        super().__init__()
        hidden = draws.randint(3, 9)
        self.norm = nn.LayerNorm(width) if draws.random() < 0.5 else nn.Identity()
        self.up = nn.Linear(width, hidden, bias=draws.random() < 0.5)
        self.down = nn.Linear(hidden, width, bias=draws.random() < 0.5)
        self.gate = nn.Parameter(torch.ones(hidden)) if draws.random() < 0.3 else None
        self.spices = draws.sample(SPICES, draws.randint(0, 3))
        self.residual = draws.random() < 0.6

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.up(self.norm(x)))
        if self.gate is not None:
            y = y * self.gate
        for spice in self.spices:
            y = spice(y)
        y = self.down(y)
        return x + y if self.residual else y


class _Model(nn.Module):
    """Blocks in some order, some of them twice, some checkpointed; a head that may share its weight with the entry."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        draws, width = random.Random(drawn.seed + 1), drawn.width
        self.entry = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(_Block(width, draws) for _ in range(drawn.blocks))
        self.head = nn.Linear(width, width, bias=False)
        if drawn.tied:
            self.head.weight = self.entry.weight
        self.order, self.checkpointed = drawn.order, drawn.checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for number in self.order:
            block = self.blocks[number]
            x = checkpoint(block, x, use_reentrant=False) if number in self.checkpointed else block(x)
        return self.head(x)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A model, how it is sharded, and how it is compiled.

    Attributes:
        order: numbers of the blocks in the order of their calls.
        checkpointed, frozen, elsewhere: numbers of blocks that are recomputed, that get no gradient, and that are sharded over
            a communicator of their own.
        meshes: ``"one"``, ``"two"`` (the blocks ``elsewhere`` use the other), ``"replicas"`` (HSDP: 2 × 1) or ``"shards"`` (1 × 2).
        options: those of the backend.
    """

    seed: int
    width: int
    rows: int
    blocks: int
    order: tuple[int, ...]
    policy: str
    reshard: bool | None
    tied: bool
    meshes: str
    checkpointed: frozenset[int]
    frozen: frozenset[int]
    elsewhere: frozenset[int]
    accumulate: int
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The model, sharded; the same on every call."""
        torch.manual_seed(self.seed)
        model = _Model(self)
        for number in self.frozen:
            model.blocks[number].requires_grad_(False)
        here, there = _meshes(self.meshes)
        policy = _POLICIES[self.policy]
        shard = partial(fully_shard, reshard_after_forward=self.reshard)
        for number, block in enumerate(model.blocks):
            mesh = there if number in self.elsewhere else here
            shard(block, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
        return shard(model, mesh=here, mp_policy=policy)

    def batch(self, model: nn.Module, number: int) -> tuple[Tensor]:
        """(rows, width), others on each rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * number + dist.get_rank())
        return (torch.randn(self.rows, self.width, generator=generator),)


def draw(seed: int, most_blocks: int = 3) -> Drawn:
    """What the seed stands for; the same on every machine."""
    draws = random.Random(seed)
    blocks = draws.randint(1, most_blocks)
    order = list(range(blocks))
    if draws.random() < 0.25:
        order.append(draws.randrange(blocks))
    meshes = draws.choice(("one", "one", "one", "two", "two", "replicas", "shards"))

    def some(share: float) -> frozenset[int]:
        return frozenset(number for number in range(blocks) if draws.random() < share)

    checkpointed, frozen, elsewhere = some(0.3), some(0.15), some(0.5)
    options: dict[str, Any] = {"strategy": draws.choice(_STRATEGIES), "memory_budget": draws.choice(_BUDGETS)}
    options["coalesce"] = draws.choice(("auto", "off", 512))
    options["launch_order"] = draws.choice(("agreed", "agreed", "priced"))
    options["reduction"] = draws.choice(("auto", "ring", "exchange"))
    others = random.Random(-1 - seed)  # so that what was drawn above and below stays the model that it was
    if options["launch_order"] == "priced":
        options["launch_order"] = others.choice(("priced", "free"))
    elif others.random() < 0.4:
        options["communicators_in_flight"] = 1
    return Drawn(
        seed=seed, width=draws.randint(4, 9), rows=draws.randint(2, 5), blocks=blocks, order=tuple(order),
        policy=draws.choice(list(_POLICIES)), reshard=draws.choice((None, True, False)), tied=draws.random() < 0.2,
        meshes=meshes, checkpointed=checkpointed, frozen=frozen,
        elsewhere=elsewhere if meshes == "two" else frozenset(), accumulate=draws.choice((1, 1, 2)), options=options,
    )  # fmt: skip


_groups: dict[str, tuple[DeviceMesh, DeviceMesh]] = {}


def _meshes(kind: str) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of most blocks and that of the others; made once a process."""
    if kind not in _groups:
        ranks = dist.get_world_size()
        if kind in ("replicas", "shards"):
            shape = (ranks, 1) if kind == "replicas" else (1, ranks)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            _groups[kind] = mesh, mesh
        else:
            mesh = init_device_mesh("cpu", (ranks,))
            _groups[kind] = mesh, DeviceMesh.from_group(dist.new_group(), "cpu") if kind == "two" else mesh
    return _groups[kind]
