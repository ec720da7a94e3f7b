"""Gradients that wait for a later backward: micro-batches that are not reduced each.

A backward that does not reduce gives its gradient to a *leaf*, a tensor without contents that stands for the parameter;
what arrives there is added up. The next backward that does reduce takes the sum in, once, whatever it is that runs:
several graphs, several forwards before one backward, several uses of one parameter::

    held back   gradient ─▶ leaf ─▶ sum
    reduced     gradient ─ add_held ─ pad ─ reduce-scatter ─ wait ─▶ shard
    HSDP        gradient ─ … ─ reduce-scatter ─ wait ─▶ leaf ─▶ sum     and     … ─ wait ─ add_held ─ all-reduce ─ wait ─▶

Sums are taken in the dtypes and in the order in which FSDP2 takes them, so that the bits are the same: a gradient that
arrives first is cast to the dtype of the reduction, one that comes later is added as it is.
"""

from __future__ import annotations

import itertools
import weakref
from functools import partial
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GRADIENT", "SHARD", "Accumulator", "Point", "add_held"]

Point = Literal["gradient", "shard"]

GRADIENT: Point = "gradient"
"""Before the reduce-scatter: as large as the whole parameter."""

SHARD: Point = "shard"
"""Between reduce-scatter and all-reduce (HSDP)."""

_accumulators: weakref.WeakValueDictionary[str, Accumulator] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Accumulator:
    """What backwards have held back of one parameter's gradient.

    Attributes:
        key: by which a graph, which holds no Python objects, finds it.
        leaves: where gradients arrive, at each point where any could be held back so far.
        sums: what has arrived.
    """

    __slots__ = ("__weakref__", "key", "leaves", "sums")

    def __init__(self, parameter: str) -> None:
        self.key = f"{parameter}#{next(_numbers)}"
        self.leaves: dict[Point, Tensor] = {}
        self.sums: dict[Point, Tensor] = {}
        _accumulators[self.key] = self

    def prepare(self, point: Point, like: Tensor, dtype: torch.dtype) -> None:
        """Let gradients in the form of ``like`` be held back at ``point`` and be added up in ``dtype``.

        A leaf that is of that form already stays: graphs know it.
        """
        before = self.leaves.get(point)
        if before is None or (before.shape, before.dtype, before.device) != (like.shape, like.dtype, like.device):
            leaf = like.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_arrived, self.sums, point, dtype))
            self.leaves[point] = leaf

    def take(self, point: Point) -> Tensor | None:
        """What was held back at ``point``, which is then no longer held here."""
        return self.sums.pop(point, None)


def _arrived(sums: dict[Point, Tensor], point: Point, dtype: torch.dtype, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:
        return
    if point in sums:
        sums[point] += gradient
    else:
        sums[point] = gradient.to(dtype)


@torch.library.custom_op("overlap_pass::add_held", mutates_args=())
def add_held(gradient: Tensor, key: str, point: str, dtype: torch.dtype, use: int) -> Tensor:
    """The gradient plus what the accumulator ``key`` has held back at ``point``; that is taken out, so it counts once.

    Args:
        gradient: of the shape of what was held back.
        dtype: of the sum.
        use: a number of its own for each call in a graph: equal calls are not one, since only the first finds something.
    """
    accumulator = _accumulators.get(key)
    held = None if accumulator is None else accumulator.take(point)  # type: ignore[arg-type]
    if held is None:
        return gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return held.add_(gradient)


@add_held.register_fake
def _(gradient: Tensor, key: str, point: str, dtype: torch.dtype, use: int) -> Tensor:
    return torch.empty_like(gradient, dtype=dtype, memory_format=torch.contiguous_format)
