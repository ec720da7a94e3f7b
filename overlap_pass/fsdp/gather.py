"""Gathering one sharded parameter, and reducing its gradient, as ops that a graph can hold.

The ops are those of eager FSDP2 for a group of one parameter, in the same order and the same dtypes, so that the numbers
are the same bit for bit where the reduction adds in the same order (always on 2 ranks)::

    forward   shard ─ cast ─ pad ─ all-gather ─ wait ─ drop padding ─▶ parameter
    backward  gradient ─ cast ─ pad ─ scale ─ reduce-scatter ─ wait [─ all-reduce ─ wait] ─ divide ─ drop padding ─ cast ─▶ shard

Where micro-batches are not reduced each, backward ends or takes something in on its way: see ``fsdp.accumulation``.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, traceback

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp.accumulation import GRADIENT, SHARD, Accumulator, Point, add_held
from overlap_pass.graph.read import ANNOTATION

__all__ = ["ANNOTATION", "GatherSpec", "Reduction", "drop_unused_gathers", "gather", "gathers_in", "reduce_held"]

ReduceOp = Literal["avg", "sum"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients become their mean over the ranks.

    Attributes:
        scatter: reduction of the reduce-scatter.
        all_reduce: reduction of the all-reduce over the replicas (HSDP).
        scale: the gradient is multiplied by it before, ``None`` for not.
        divide: the result is divided by it, ``None`` for not.
    """

    scatter: ReduceOp = "avg"
    all_reduce: ReduceOp = "avg"
    scale: float | None = None
    divide: float | None = None


@dataclass(frozen=True, slots=True)
class GatherSpec:
    """Everything that gathering one parameter needs beside its shard; the same on every rank.

    The shard's own dtype is not in it: ``model.to(dtype)`` may change that after the conversion, too.

    Attributes:
        unit: qualified name of the module that ``fully_shard`` was called on, ``""`` for the root.
        parameter: qualified name of the parameter.
        shape: of the gathered parameter (of this rank's part of it, under tensor parallelism).
        shard_dim: the dimension that is sharded.
        padded_rows: rows that each rank sends; where the ranks' rows do not add up to ``shape[0]``, shards are padded.
        param_dtype: what travels in the all-gather and what the module computes with, ``None`` for the shard's dtype.
        reduce_dtype: what travels in the reduce-scatter, ``None`` for the gradient's dtype.
        shard_group, shard_ranks: the group that the parameter is gathered over.
        reduce_group: the group of the reduce-scatter; the same ranks.
        replicate_group, replicate_ranks: the group that gradients are all-reduced over as well (HSDP); ``None`` and 1
            without one.
        divide_factor: what the sum of the gradients is divided by, ``None`` for the number of ranks.
        sum_only: use no collective but sums.
        ahead: the gather may be launched before the graph that it stands in (``fsdp.edge``).
    """

    unit: str
    parameter: str
    shape: tuple[int, ...]
    shard_dim: int
    padded_rows: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    shard_group: str
    shard_ranks: int
    reduce_group: str
    replicate_group: str | None
    replicate_ranks: int
    divide_factor: float | None
    sum_only: bool
    ahead: bool = False

    @property
    def padded(self) -> bool:
        """Whether the all-gather carries padding. Asked of the whole, so that all ranks pad or none (by 0 rows)."""
        return self.shard_dim == 0 and self.padded_rows * self.shard_ranks != self.shape[0]

    def gather_dtype(self, shard_dtype: torch.dtype) -> torch.dtype:
        """The gathered parameter's dtype; parameters that are not floating-point keep theirs."""
        return self.param_dtype if self.param_dtype is not None and shard_dtype.is_floating_point else shard_dtype

    def reduced_dtype(self, shard_dtype: torch.dtype) -> torch.dtype:
        """What travels in the reduce-scatter; gradients come in the dtype of the gathered parameter."""
        return self.reduce_dtype or self.gather_dtype(shard_dtype)

    @property
    def reduced_shape(self) -> tuple[int, ...]:
        """Shape of what a reduce-scatter returns, padding included."""
        if self.shard_dim == 0:
            return (self.padded_rows, *self.shape[1:])
        parts = list(self.shape)
        parts[self.shard_dim] //= self.shard_ranks
        return tuple(parts)

    def reduction(self, dtype: torch.dtype) -> Reduction:
        """The steps that FSDP2 takes from gradients of ``dtype`` on each rank to their mean.

        float32 and bfloat16 let the collective average. Other dtypes could overflow in the sum: the gradients are
        divided by a power of two near the root of the divisor before, and by the rest after.
        """
        divisor = self.divide_factor
        may_overflow = dtype not in (torch.float32, torch.bfloat16)
        if not may_overflow and not self.sum_only:
            if divisor is None:
                return Reduction()
            if divisor == self.shard_ranks:
                return Reduction(scatter="avg", all_reduce="sum")
            # FSDP2 asks NCCL for a sum with a factor on each rank's input.
            return Reduction(scatter="sum", all_reduce="sum", scale=1 / divisor)
        if divisor is None:
            divisor = float(self.shard_ranks * self.replicate_ranks)
        before = 1
        while may_overflow and divisor % before == 0 and divisor / before > before:
            before *= 2
        # Multiplying by the inverse of a power of two is exact.
        scale = None if before == 1 else 1 / before
        divide = None if divisor == before else divisor / before
        return Reduction(scatter="sum", all_reduce="sum", scale=scale, divide=divide)

    def to_json(self) -> str:
        fields = asdict(self)
        for name in ("param_dtype", "reduce_dtype"):
            fields[name] = fields[name] and str(fields[name]).removeprefix("torch.")
        return json.dumps(fields)

    @classmethod
    @functools.cache
    def from_json(cls, text: str) -> GatherSpec:
        fields = json.loads(text)
        for name in ("param_dtype", "reduce_dtype"):
            fields[name] = fields[name] and getattr(torch, fields[name])
        return cls(**{**fields, "shape": tuple(fields["shape"])})


@torch.compiler.allow_in_graph
def gather(
    parameter: Tensor, how: str, reshard: bool, key: str = "", hold: Point | None = None, leaf: Tensor | None = None
) -> Tensor:
    """The full parameter from its shards; its gradient is reduced back to the shard.

    Dynamo puts a call of this function into its graph as it stands, and AOTAutograd traces through it. That takes a
    third of the time that Dynamo would need to look inside; and because ``how`` is a constant of the graph, two models
    that differ in any of it never share a cache entry.

    Args:
        parameter: the sharded DTensor parameter.
        how: a :class:`GatherSpec` as JSON.
        reshard: whether a graph should gather again in backward instead of keeping the result (ZeRO-3); only noted on
            the nodes, for the passes that partition the graph.
        key: of the accumulator whose gradients are reduced together with this one's, ``""`` for none.
        hold: where backward ends: the gradient so far is then that of ``leaf``, and the shard gets none.

    Returns:
        A plain tensor of shape ``GatherSpec.shape``.

    Raises:
        ConversionError: ``leaf`` is of another dtype than the gradient will be.
    """
    spec = GatherSpec.from_json(how)
    expected = spec.gather_dtype(parameter.dtype)
    if leaf is not None and hold == GRADIENT and leaf.dtype != expected:
        raise ConversionError(
            f"{spec.parameter}: gradients are held back in {leaf.dtype} but come in {expected} since the model's dtype was "
            "changed: call set_requires_gradient_sync(False) again behind that"
        )
    note: dict[str, Any] = {"unit": spec.unit, "parameter": spec.parameter, "reshard": reshard}
    with traceback.annotate({ANNOTATION: {**note, "ahead": True} if spec.ahead else note}):
        # The shard of a gradient that is held back gets none: not zeros either, which torch 2.11 makes of that.
        source = parameter if leaf is None else parameter.detach()
        shard = source.to_local(grad_placements=parameter.placements)
        return _Gather.apply(shard, spec, key, hold, leaf)


def reduce_held(parameter: Tensor, spec: GatherSpec, accumulator: Accumulator, hold: Point | None) -> Tensor | None:
    """Reduce what waits, where no backward did; this rank's part, or ``None`` if it goes on waiting.

    Outside of graphs. All ranks must call it for the same parameters in the same order.
    """
    held, waiting = accumulator.take(GRADIENT), accumulator.take(SHARD)
    parts = [part for part in (None if held is None else _scatter(held, spec), waiting) if part is not None]
    if not parts:
        return None
    shard = sum(parts[1:], parts[0])
    if hold == SHARD:
        accumulator.sums[SHARD] = shard
        return None
    return _finish(shard, spec, parameter.to_local().shape[0], parameter.dtype)


def gathers_in(gm: GraphModule) -> Iterator[tuple[GatherSpec, bool]]:
    """What a Dynamo graph gathers, graphs inside it included: how, and whether again in backward."""
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.target is gather:
                yield GatherSpec.from_json(node.args[1]), node.args[2]


def drop_unused_gathers(gm: GraphModule) -> int:
    """Remove from a Dynamo graph, in place, the gathers that nothing computes with; returns how many.

    Code such as ``x.to(self.weight.dtype)`` reads a parameter and lets go of it. Later graphs would keep that gather for
    good: a wait counts as a side effect.
    """
    unused = [node for node in gm.graph.nodes if node.target is gather and not node.users]
    for node in unused:
        gm.graph.erase_node(node)
    if unused:
        gm.recompile()
    return len(unused)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, spec: GatherSpec, key: str, hold: Point | None, leaf: Tensor | None) -> Tensor:
        ctx.spec, ctx.key, ctx.hold = spec, key, hold
        ctx.rows, ctx.dtype = shard.shape[0], shard.dtype
        return _all_gather(shard, spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, Tensor | None]:
        spec, key = ctx.spec, ctx.key
        if ctx.hold == GRADIENT:
            return None, None, None, None, gradient
        dtype = spec.reduce_dtype or gradient.dtype
        gradient = add_held(gradient, key, GRADIENT, dtype, next(_uses)) if key else _cast(gradient, dtype)
        shard = _scatter(gradient, spec)
        if ctx.hold == SHARD:
            return None, None, None, None, shard
        if key and spec.replicate_group is not None:
            shard = add_held(shard, key, SHARD, shard.dtype, next(_uses))
        return _finish(shard, spec, ctx.rows, ctx.dtype), None, None, None, None


_uses = itertools.count()


def _all_gather(shard: Tensor, spec: GatherSpec) -> Tensor:
    shard = _cast(shard, spec.gather_dtype(shard.dtype))
    if spec.shard_ranks == 1:
        return shard.view_as(shard)
    if spec.padded:
        shard = _pad_rows(shard, spec.padded_rows)
    c10d = torch.ops._c10d_functional
    full = c10d.all_gather_into_tensor(shard.contiguous(), spec.shard_ranks, spec.shard_group)
    full = c10d.wait_tensor(full)
    if spec.shard_dim != 0:
        # The ranks' shards arrive stacked along dimension 0.
        return torch.cat(torch.chunk(full, spec.shard_ranks, dim=0), dim=spec.shard_dim)
    return full.narrow(0, 0, spec.shape[0]) if spec.padded else full


def _scatter(gradient: Tensor, spec: GatherSpec) -> Tensor:
    """From the gradient of the whole parameter, in the dtype that travels, to this rank's part of the sum."""
    reduction = spec.reduction(gradient.dtype)
    if reduction.scale is not None:
        gradient = gradient * reduction.scale
    if spec.shard_ranks == 1:
        return gradient
    if spec.shard_dim != 0:
        gradient = torch.cat(torch.chunk(gradient, spec.shard_ranks, dim=spec.shard_dim), dim=0)
    if spec.padded:
        gradient = _pad_rows(gradient, spec.padded_rows * spec.shard_ranks)
    c10d = torch.ops._c10d_functional
    part = c10d.reduce_scatter_tensor(gradient.contiguous(), reduction.scatter, spec.shard_ranks, spec.reduce_group)
    return c10d.wait_tensor(part)


def _finish(shard: Tensor, spec: GatherSpec, rows: int, dtype: torch.dtype) -> Tensor:
    """From this rank's part to the gradient of the shard: over the replicas, divided, without padding, in its dtype."""
    reduction = spec.reduction(shard.dtype)
    c10d = torch.ops._c10d_functional
    if spec.replicate_group is not None:
        shard = c10d.all_reduce(shard.contiguous(), reduction.all_reduce, spec.replicate_group)
        shard = c10d.wait_tensor(shard)
    if reduction.divide is not None:
        shard = shard / reduction.divide
    if spec.padded:
        shard = shard.narrow(0, 0, rows)
    return _cast(shard, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.constant_pad_nd(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows - tensor.shape[0]])
