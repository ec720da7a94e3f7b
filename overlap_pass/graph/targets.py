"""What the reader knows about operators: collectives, views, random draws, effects, rooflines, FLOPs.

Only facts about operators stand here; how a graph is read with them is in ``graph.read``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from overlap_pass.graph.program import Category, CollectiveKind

__all__ = [
    "KNOWN_NAMESPACES",
    "category",
    "collective_kind",
    "draws_random",
    "flop_formula",
    "goes_by_copy",
    "goes_directly",
    "group_of",
    "is_opaque",
    "is_wait",
    "runs_kernel",
]

_FUNCTIONAL = "_c10d_functional"
_OURS = {
    "gather_start": CollectiveKind.ALL_GATHER,
    "gather_start_coalesced": CollectiveKind.ALL_GATHER,
    "gather_ahead": CollectiveKind.ALL_GATHER,
    "exchange_start": CollectiveKind.REDUCE_SCATTER,
    "exchange_start_coalesced": CollectiveKind.REDUCE_SCATTER,
}
_OUR_WAIT = "exchange_finish"
_KINDS = {
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_out": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_coalesced": CollectiveKind.ALL_GATHER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_reduce_": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "broadcast_": CollectiveKind.BROADCAST,
}

KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor", "_c10d_functional", "overlap_pass"})
"""Operators of these namespaces do what their schema says and nothing else; all others are never crossed."""

_PURE_HIGHER_ORDER = frozenset({"flex_attention", "flex_attention_backward", "invoke_subgraph", "cond", "while_loop"})
_RANDOM_HIGHER_ORDER = frozenset(
    {"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state", "rngprims"}
)
_RANDOM_OPS = frozenset(
    {"inductor_seed", "inductor_seeds", "inductor_random", "inductor_randint", "inductor_force_stride_order_random"}
)
_MATMUL = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution", "convolution_backward", "_grouped_mm"}
)
_REDUCTION = frozenset(
    {"sum", "mean", "amax", "amin", "var", "var_mean", "argmax", "argmin", "logsumexp", "_log_softmax", "_softmax"}
    | {"_log_softmax_backward_data", "_softmax_backward_data", "native_layer_norm", "native_layer_norm_backward"}
    | {"_fused_rms_norm", "_fused_rms_norm_backward", "nll_loss_forward", "nll_loss_backward", "cumsum", "prod", "any"}
)
_COPY = frozenset(
    {"cat", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "reshape", "split_with_sizes_copy", "stack"}
    | {"as_strided_copy", "slice_scatter", "select_scatter", "_unsafe_view_copy", "pad"}
)
_POINTWISE = frozenset(
    {
        "_to_copy",
        "add_held",
        "full",
        "full_like",
        "arange",
        "iota",
        "scalar_tensor",
        "zeros",
        "ones",
        "empty",
        "zeros_like",
        "tril",
    }
)
_INDEX = frozenset(
    {"embedding", "embedding_dense_backward", "gather", "scatter", "scatter_add", "index", "index_put", "index_select"}
    | {"_unsafe_index", "_unsafe_index_put", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"}
    | {"index_add", "scatter_reduce", "sort", "topk", "nonzero"}
)


def _name(target: object) -> str:
    """``mm`` of ``aten.mm.default``; the plain name of a higher-order op or function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name).rsplit("::", 1)[-1]
    return str(getattr(target, "__name__", target))


def collective_kind(target: object) -> CollectiveKind | None:
    """The collective that a call to ``target`` launches, or ``None``."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace == "overlap_pass":
        return _OURS.get(_name(target))
    if target.namespace != _FUNCTIONAL or is_wait(target):
        return None
    return _KINDS.get(_name(target), CollectiveKind.OTHER)


def group_of(node: torch.fx.Node) -> str | None:
    """Name of the process group that a node launches a collective on; ``None`` for any other node."""
    if collective_kind(node.target) is None:
        return None
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return str({**dict(zip(names, node.args, strict=False)), **node.kwargs}.get("group_name"))


def is_wait(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return _name(target) in {_FUNCTIONAL: ("wait_tensor",), "overlap_pass": (_OUR_WAIT, "wait_late")}.get(
        target.namespace, ()
    )


def runs_kernel(target: object) -> bool:
    """Whether a launch or wait runs a kernel of its own on the compute stream."""
    return isinstance(target, torch._ops.OpOverload) and (
        target.namespace == "overlap_pass" and _name(target) in (_OUR_WAIT, "gather_start", "gather_start_coalesced")
    )


def goes_by_copy(target: object, by_copy: object) -> bool:
    """Whether copy engines carry what a call launches, given its argument ``by_copy`` if it has one."""
    ours = isinstance(target, torch._ops.OpOverload) and target.namespace == "overlap_pass"
    return ours and (by_copy is True or _name(target).startswith("gather_start"))


def goes_directly(target: object) -> bool:
    """Whether every rank sends to every other by itself in a reduction that a call launches."""
    return collective_kind(target) is CollectiveKind.REDUCE_SCATTER and _name(target).startswith("exchange_start")


def draws_random(target: object) -> bool:
    """Whether a call consumes the random state (global generator, philox state or a seed op)."""
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or _name(target) in _RANDOM_OPS
    return _name(target) in _RANDOM_HIGHER_ORDER or "philox" in _name(target)


def is_opaque(target: object, pure: Collection[str] = ()) -> bool:
    """Whether a call may have effects that its schema does not tell; operators of the namespaces ``pure`` have none."""
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in KNOWN_NAMESPACES and target.namespace not in pure
    if target is operator.getitem or getattr(target, "__module__", "") in ("operator", "_operator", "math", "builtins"):
        return False
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _name(target) not in _PURE_HIGHER_ORDER | _RANDOM_HIGHER_ORDER
    return not getattr(target, "__module__", "").startswith("torch")


def category(target: object) -> Category:
    """The roofline for a compute op. Whether the op is a view is not decided here: that depends on its tensors."""
    name = _name(target)
    if name in _MATMUL:
        return Category.MATMUL
    if "scaled_dot_product" in name or "flash_attention" in name or name.startswith("flex_attention"):
        return Category.ATTENTION
    for names, found in ((_REDUCTION, Category.REDUCTION), (_COPY, Category.COPY), (_INDEX, Category.INDEX)):
        if name in names:
            return found
    if not isinstance(target, torch._ops.OpOverload):
        return Category.OTHER
    pointwise = torch.Tag.pointwise in target.tags or target.namespace == "prims" or name in _POINTWISE
    return Category.POINTWISE if pointwise else Category.OTHER


def flop_formula(target: object) -> Callable[..., int] | None:
    """``f(*args, out_val=..., **kwargs) -> flops``, a multiply-add counting 2; ``None`` where none is known.

    Attention has a formula of its own: torch's refuses grouped key/value heads, does not know the CPU operators and
    counts the masked half of causal attention, which no fused kernel computes.
    """
    if isinstance(target, torch._ops.OpOverload) and "scaled_dot_product" in _name(target):
        return partial(_attention_flops, target)
    packet = getattr(target, "overloadpacket", None)
    formula: Any = flop_registry.get(packet) if packet is not None else None
    return formula  # type: ignore[no-any-return]


def _attention_flops(target: torch._ops.OpOverload, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Products of b·h matrices of q × k with width d (and d_v), at 2 FLOPs a multiply-add; half of it if causal.

    Forward: Q·Kᵀ (d) and P·V (d_v). Backward: S again, dQ, dK (d each), dV, dP (d_v each). Heads are the query's, also
    where key/value heads are shared (Dao et al., FlashAttention-2, 2023, section 3.1 counts the same way).
    """
    named = dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | kwargs
    batch, heads, rows, width = named["query"].shape
    columns, value_width = named["key"].shape[-2], named["value"].shape[-1]
    widths = 3 * width + 2 * value_width if "backward" in _name(target) else width + value_width
    return int(2 * batch * heads * rows * columns * widths) // (2 if named.get("is_causal") else 1)
