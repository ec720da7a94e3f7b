"""Trains two copies of a model side by side and says where their numbers differ, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import overlap_pass
from tests.cpu.models import tokens

__all__ = [
    "Recipe",
    "Training",
    "adamw",
    "compare",
    "differences",
    "float_batch",
    "mean_square",
    "token_batch",
    "train",
]


def token_batch(model: nn.Module, number: int) -> tuple[Any, ...]:
    """Token ids, others on each rank."""
    return (tokens(model.config, seed=100 * number + dist.get_rank()),)


def float_batch(width: int, model: nn.Module, number: int) -> tuple[Any, ...]:
    """A (3, width) tensor, another on each rank."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return (torch.randn(3, width, generator=generator),)


def mean_square(output: Any) -> Tensor:
    """Of every tensor in the output, added up."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return torch.stack([leaf.float().pow(2).mean() for leaf in leaves]).sum()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How both copies are trained.

    Attributes:
        batch: the model's arguments, given the model and the number of the batch.
        accumulate: backwards per optimizer step.
        reduced: which of these backwards reduce gradients, and over the replicas of HSDP: ``"each"``, only the last
            (``"once"``), or each but for the all-reduce (``"all-reduce once"``).
        clip: norm that gradients are clipped to.
        steps: optimizer steps.
        first: number of the first batch.
        loss: of what the model returns.
    """

    batch: Callable[[nn.Module, int], tuple[Any, ...]] = token_batch
    accumulate: int = 1
    reduced: Literal["each", "once", "all-reduce once"] = "each"
    clip: float | None = None
    steps: int = 3
    first: int = 0
    loss: Callable[[Any], Tensor] = mean_square


@dataclass(frozen=True, slots=True)
class Training:
    """Local tensors of one run: a loss per backward, gradients at the end of each step, the shards at the end."""

    losses: tuple[Tensor, ...]
    gradients: tuple[dict[str, Tensor | None], ...]
    parameters: dict[str, Tensor]


def compare(
    build: Callable[[], nn.Module], recipe: Recipe, backend: str | Callable[..., Any] | None
) -> tuple[list[str], int]:
    """Differences between eager FSDP2 and the converted model, and how many gradients were not all zero.

    The converted model's optimizer is made before the conversion. ``backend`` compiles it in one graph; ``None`` runs it
    uncompiled.
    """
    reference = build()
    expected = train(reference, adamw(reference), recipe)
    model = build()
    optimizer = adamw(model)
    assert overlap_pass.make_traceable(model) is model
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    found = train(model, optimizer, recipe, call=call)
    nonzero = sum(
        bool(gradient.any()) for step in found.gradients for gradient in step.values() if gradient is not None
    )
    return differences(expected, found), nonzero


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    *,
    call: Callable[..., Any] | None = None,
) -> Training:
    """Train the model, calling ``call`` (its compiled form) in its place."""
    forward = model if call is None else call
    losses, gradients = [], []
    for step in range(recipe.first, recipe.first + recipe.steps):
        for part in range(recipe.accumulate):
            if recipe.reduced != "each":
                hold = "set_requires_gradient_sync" if recipe.reduced == "once" else "set_requires_all_reduce"
                getattr(model, hold)(part == recipe.accumulate - 1)
            loss = recipe.loss(forward(*recipe.batch(model, step * recipe.accumulate + part)))
            loss.backward()
            losses.append(loss.detach())
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        gradients.append({name: p.grad if p.grad is None else _local(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return Training(tuple(losses), tuple(gradients), {name: _local(p) for name, p in model.named_parameters()})


def differences(expected: Training, found: Training) -> list[str]:
    """Names of the losses, gradients and parameters that are not equal in every bit."""
    wrong = [f"loss {i}" for i, pair in enumerate(zip(expected.losses, found.losses, strict=True)) if not _same(*pair)]
    for step, (one, other) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
        assert one.keys() == other.keys()
        wrong += [f"gradient of {name} in step {step}" for name in one if not _same(one[name], other[name])]
    assert expected.parameters.keys() == found.parameters.keys()
    return wrong + [name for name, shard in expected.parameters.items() if not _same(shard, found.parameters[name])]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
