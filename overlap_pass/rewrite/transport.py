"""Collectives in an FX graph handed to another carrier: copy engines, or an exchange instead of a ring reduction.

::

    shard ─ cast ─ all-gather ─ wait                ⇒  shard ─ gather_start ─ wait
    gradient ─ cast [─ pad] ─ reduce-scatter ─ wait ⇒  gradient [─ pad] ─ exchange_start ─ exchange_finish
                                                           └─────────────────────────────────▲
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from overlap_pass.graph.program import Category
from overlap_pass.graph.read import ANNOTATION
from overlap_pass.graph.targets import category
from overlap_pass.rewrite.unread import erase_unread
from overlap_pass.transport import ops
from overlap_pass.transport.choice import Carriers
from overlap_pass.transport.total import Total

__all__ = ["carry", "copied"]

_FUNCTIONAL = torch.ops._c10d_functional
_GATHER = _FUNCTIONAL.all_gather_into_tensor.default
_REDUCE = _FUNCTIONAL.reduce_scatter_tensor.default
_WAIT = _FUNCTIONAL.wait_tensor.default
_PAD = torch.ops.aten.constant_pad_nd.default
_CLONE = torch.ops.aten.clone.default
_VIEWS = (
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default,
)
_CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
_SUMMED = (torch.float32, torch.bfloat16)


def carry(graph: fx.Graph, carriers: Carriers) -> None:
    """Replace, in place, the gathers of parameters and reductions of gradients that ``carriers`` takes over.

    Only what the capture has noted as such is touched: collectives of activations stay with their communicator. Where copies
    land is settled with the order of the graph, by ``rewrite.places``.

    Raises:
        OptionError: copy engines are asked for where they cannot work.
    """
    for node, by_copy in _captured(graph, carriers):
        if node.target is _GATHER and by_copy:
            _gather(graph, node)
        elif node.target is _REDUCE:
            _reduce(graph, node, carriers, by_copy)


def copied(graph: fx.Graph, carriers: Carriers) -> set[str]:
    """Names of the collectives that :func:`carry` would hand to copy engines.

    Raises:
        OptionError: copy engines are asked for where they cannot work.
    """
    found = set()
    for node, by_copy in _captured(graph, carriers):
        *_, size, _ = node.args
        if by_copy and (node.target is _GATHER or carriers.exchanges(size, by_copy, halves=True)):
            found.add(node.name)
    return found


def _captured(graph: fx.Graph, carriers: Carriers) -> Iterator[tuple[fx.Node, bool]]:
    """Gathers of parameters and reductions of gradients, and whether copy engines may carry them."""
    for node in list(graph.nodes):
        if node.target in (_GATHER, _REDUCE) and ANNOTATION in (node.meta.get("custom") or {}):
            yield node, carriers.by_copy(node.args[-1], _value(node).is_cuda)


def _gather(graph: fx.Graph, node: fx.Node) -> None:
    sent, size, group_name = node.args
    shard = _uncast(sent) if _only_for(sent, node) else sent
    with graph.inserting_before(node):
        start = graph.call_function(ops.GATHER_START, (shard, _value(node).dtype, size, group_name, []))
    start.meta = dict(node.meta)
    node.replace_all_uses_with(start)
    graph.erase_node(node)
    erase_unread(graph, sent, (*_CASTS, _PAD))


def _reduce(graph: fx.Graph, node: fx.Node, carriers: Carriers, by_copy: bool) -> None:
    sent, reduce_op, size, group_name = node.args
    wait, *others = node.users
    gradient, pad = _before_the_cast(node)
    dtype = _value(node).dtype
    known = reduce_op in ("avg", "sum") and dtype in _SUMMED and not others and wait.target is _WAIT
    halves = _value(gradient).itemsize < dtype.itemsize
    if not known or not carriers.exchanges(size, by_copy, halves):
        return
    how: tuple[Any, ...] = (Total(reduce_op == "avg", dtype).spec, size, group_name, by_copy, [])
    with graph.inserting_before(node):
        if pad is not None:
            gradient = _again(graph, pad, gradient)
        if not _value(gradient).is_contiguous():
            gradient = _contiguous(graph, gradient)
        start = graph.call_function(ops.EXCHANGE_START, (gradient, *how))
        value = _value(gradient)
        start.meta = {**node.meta, "val": value.new_empty(1) if by_copy else torch.empty_like(value)}
    with graph.inserting_before(wait):
        finish = graph.call_function(ops.EXCHANGE_FINISH, (start, gradient, *how))
        finish.meta = dict(wait.meta)
    wait.replace_all_uses_with(finish)
    for gone in (wait, node):
        graph.erase_node(gone)
    erase_unread(graph, sent, (*_CASTS, _PAD))


def _before_the_cast(reduction: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """What is reduced, before it was cast for it, and the padding that has to be done to that instead."""
    sent = reduction.args[0]
    pad = sent if sent.target is _PAD and _only_for(sent, reduction) else None
    cast, reader = (sent, reduction) if pad is None else (pad.args[0], pad)
    source = _uncast(cast) if _only_for(cast, reader) else cast
    return (sent, None) if source is cast or not _is_product(source) else (source, pad)


def _is_product(node: fx.Node) -> bool:
    """Whether a matmul writes the gradient, which then exists in its own dtype.

    What a compiler fuses with the cast behind it (norms, embeddings: few bytes) may never have been rounded to that
    dtype; sent before the cast, it would be.
    """
    while node.target in _VIEWS:
        node = node.args[0]
    return node.op == "call_function" and category(node.target) is Category.MATMUL


def _again(graph: fx.Graph, pad: fx.Node, source: fx.Node) -> fx.Node:
    padded = graph.call_function(_PAD, (source, *pad.args[1:]), dict(pad.kwargs))
    padded.meta = {**pad.meta, "val": _value(pad).to(_value(source).dtype)}
    return padded


def _contiguous(graph: fx.Graph, source: fx.Node) -> fx.Node:
    clone = graph.call_function(_CLONE, (source,), {"memory_format": torch.contiguous_format})
    clone.meta = {**source.meta, "val": _value(source).contiguous()}
    return clone


def _uncast(node: fx.Node) -> fx.Node:
    """What a cast between floating-point dtypes reads; the node itself if it is none."""
    if node.target not in _CASTS:
        return node
    source = node.args[0]
    same_place = _value(source).device == _value(node).device and _value(source).is_contiguous()
    return source if same_place and _value(source).is_floating_point() else node


def _only_for(node: fx.Node, reader: fx.Node) -> bool:
    return list(node.users) == [reader]


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
