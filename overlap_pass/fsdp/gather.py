"""Gathering one sharded parameter, and reducing its gradient, as ops that a graph can hold.

The ops are those of eager FSDP2 for a group of one parameter, in the same order and the same dtypes, so that the numbers
are the same bit for bit where the reduction adds in the same order (always on 2 ranks)::

    forward   shard ─ cast ─ pad ─ all-gather ─ wait ─ drop padding ─▶ parameter
    backward  gradient ─ cast ─ pad ─ scale ─ reduce-scatter ─ wait [─ all-reduce ─ wait] ─ divide ─ drop padding ─ cast ─▶ shard
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, traceback

__all__ = ["ANNOTATION", "GatherSpec", "Reduction", "drop_unused_gathers", "gather"]

# Key in ``node.meta["custom"]`` of every node that gathers a parameter or reduces its gradient.
ANNOTATION = "overlap_pass"

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
    """Everything that gathering one parameter needs; the same on every rank.

    Attributes:
        unit: qualified name of the module that ``fully_shard`` was called on, ``""`` for the root.
        parameter: qualified name of the parameter.
        shape: of the gathered parameter (of this rank's part of it, under tensor parallelism).
        shard_dim: the dimension that is sharded.
        padded_rows: rows that each rank sends; where the ranks' rows do not add up to ``shape[0]``, shards are padded.
        gather_dtype: what travels in the all-gather and what the module computes with.
        reduce_dtype: what travels in the reduce-scatter; ``None`` for the gradient's own.
        shard_dtype: of the shard and its gradient.
        shard_group, shard_ranks: the group that the parameter is gathered over.
        reduce_group: the group of the reduce-scatter; the same ranks.
        replicate_group, replicate_ranks: the group that gradients are all-reduced over as well (HSDP); ``None`` and 1
            without one.
    """

    unit: str
    parameter: str
    shape: tuple[int, ...]
    shard_dim: int
    padded_rows: int
    gather_dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    shard_dtype: torch.dtype
    shard_group: str
    shard_ranks: int
    reduce_group: str
    replicate_group: str | None
    replicate_ranks: int
    reduction: Reduction

    @property
    def padded(self) -> bool:
        """Whether the all-gather carries padding. Asked of the whole, so that all ranks pad or none (by 0 rows)."""
        return self.shard_dim == 0 and self.padded_rows * self.shard_ranks != self.shape[0]

    @property
    def gathered_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.gather_dtype.itemsize

    def to_json(self) -> str:
        fields = asdict(self)
        for name in _DTYPES:
            fields[name] = fields[name] and str(fields[name]).removeprefix("torch.")
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> GatherSpec:
        fields = json.loads(text)
        for name in _DTYPES:
            fields[name] = fields[name] and getattr(torch, fields[name])
        shape, reduction = tuple(fields["shape"]), Reduction(**fields["reduction"])
        return cls(**{**fields, "shape": shape, "reduction": reduction})


_DTYPES = ("gather_dtype", "reduce_dtype", "shard_dtype")
_spec = functools.lru_cache(maxsize=None)(GatherSpec.from_json)


@torch.compiler.allow_in_graph
def gather(parameter: Tensor, how: str, reshard: bool) -> Tensor:
    """The full parameter from its shards; its gradient is reduced back to the shard.

    Dynamo puts a call of this function into its graph as it stands, and AOTAutograd traces through it. That takes a
    third of the time that Dynamo would need to look inside; and because ``how`` is a constant of the graph, two models
    that differ in any of it never share a cache entry.

    Args:
        parameter: the sharded DTensor parameter.
        how: a :class:`GatherSpec` as JSON.
        reshard: whether a graph should gather again in backward instead of keeping the result (ZeRO-3); only noted on
            the nodes, for the passes that partition the graph.

    Returns:
        A plain tensor of shape ``GatherSpec.shape``.
    """
    spec = _spec(how)
    with traceback.annotate({ANNOTATION: {"unit": spec.unit, "parameter": spec.parameter, "reshard": reshard}}):
        shard = parameter.to_local(grad_placements=parameter.placements)
        return _Gather.apply(shard, spec)


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
    def forward(ctx: Any, shard: Tensor, spec: GatherSpec) -> Tensor:
        ctx.spec = spec
        ctx.rows = shard.shape[0]
        return _all_gather(shard, spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce(gradient, ctx.spec, ctx.rows), None


def _all_gather(shard: Tensor, spec: GatherSpec) -> Tensor:
    shard = _cast(shard, spec.gather_dtype)
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


def _reduce(gradient: Tensor, spec: GatherSpec, rows: int) -> Tensor:
    c10d = torch.ops._c10d_functional
    reduction = spec.reduction
    if spec.reduce_dtype is not None:
        gradient = _cast(gradient, spec.reduce_dtype)
    if reduction.scale is not None:
        gradient = gradient * reduction.scale
    if spec.shard_ranks > 1:
        if spec.shard_dim != 0:
            gradient = torch.cat(torch.chunk(gradient, spec.shard_ranks, dim=spec.shard_dim), dim=0)
        if spec.padded:
            gradient = _pad_rows(gradient, spec.padded_rows * spec.shard_ranks)
        gradient = c10d.reduce_scatter_tensor(
            gradient.contiguous(), reduction.scatter, spec.shard_ranks, spec.reduce_group
        )
        gradient = c10d.wait_tensor(gradient)
    if spec.replicate_group is not None:
        gradient = c10d.all_reduce(gradient.contiguous(), reduction.all_reduce, spec.replicate_group)
        gradient = c10d.wait_tensor(gradient)
    if reduction.divide is not None:
        gradient = gradient / reduction.divide
    if spec.padded:
        gradient = gradient.narrow(0, 0, rows)
    return _cast(gradient, spec.shard_dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.constant_pad_nd(tensor, [0, 0] * (tensor.dim() - 1) + [0, rows - tensor.shape[0]])
