"""In an FX graph: which gathers could be under way before it runs, and the operator that takes them.

::

    shard ─ cast ─ pad ─ all-gather ─ wait     ⇒     shard ─ gather_ahead ─ wait
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from overlap_pass.graph.program import CollectiveKind
from overlap_pass.graph.read import ANNOTATION
from overlap_pass.graph.targets import collective_kind, group_of
from overlap_pass.rewrite.unread import erase_unread
from overlap_pass.transport.ahead import GATHER_AHEAD
from overlap_pass.transport.late import WAIT_LATE

__all__ = ["could_be_ahead", "take_ahead", "wait_late"]

_PAD = torch.ops.aten.constant_pad_nd.default
_VIEW = torch.ops.aten.view.default
_COPIES = (
    torch.ops.prims.convert_element_type.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    _PAD,
    _VIEW,
)


def could_be_ahead(graph: fx.Graph) -> list[str]:
    """Names of the launches, from the first on, that could be made before the graph runs; it ends before the first that could not.

    Ranks launch in one order, and what is ahead of all others keeps it. A gather could be ahead if the capture has noted that
    its parameter may be (a ``StepEdge`` is there), and if nothing but casts and padding lies between it and the shard.
    """
    found = []
    for node in graph.nodes:
        if collective_kind(node.target) is None:
            continue
        if _gather_of(node) is None:
            break
        found.append(node.name)
    return found


def take_ahead(graph: fx.Graph, names: Sequence[str]) -> None:
    """Let launches, in place, take what is under way already; ``names`` as :func:`could_be_ahead` gave them, or the first of them."""
    nodes = {node.name: node for node in graph.nodes}
    for number, name in enumerate(names):
        node = nodes[name]
        gather = _gather_of(node)
        if gather is None:
            raise ValueError(f"{name} is no gather that could be ahead")
        _replace(graph, node, gather, first=number == 0)


@dataclass(frozen=True, slots=True)
class _Gather:
    shards: tuple[fx.Node, ...]
    dtype: torch.dtype
    rows: tuple[int, ...]
    ranks: int
    group_name: str


def _gather_of(node: fx.Node) -> _Gather | None:
    """A launch as one of shards as they are, or ``None`` if it is another."""
    note = (node.meta.get("custom") or {}).get(ANNOTATION) or {}
    if collective_kind(node.target) is not CollectiveKind.ALL_GATHER or not note.get("ahead"):
        return None
    sent = list(_members(node.args[0]))
    shards = [_shard(one) for one in sent]
    values = list(_members(node.meta["val"]))
    rows = [one.meta["val"].shape[0] for one in sent]
    if None in shards or not all(isinstance(count, int) for count in rows):
        return None
    group_name = str(group_of(node))
    ranks = values[0].shape[0] // rows[0]
    return _Gather(tuple(filter(None, shards)), values[0].dtype, tuple(rows), ranks, group_name)


def _members(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, (list, tuple)) else (value,)


def _shard(sent: fx.Node) -> fx.Node | None:
    """The input of the graph that is sent with more rows at most, and in another dtype."""
    node = sent
    while node.op == "call_function" and node.target in _COPIES:
        source = node.args[0]
        if not isinstance(source, fx.Node) or not _keeps_rows(node, source):
            return None
        node = source
    if node.op != "placeholder" or node.meta["val"].device != sent.meta["val"].device:
        return None
    return node if node.meta["val"].is_contiguous() else None


def _keeps_rows(copy: fx.Node, source: fx.Node) -> bool:
    """Whether the rows stay as they are, with zeros behind the last at most, as the capture pads."""
    if copy.target is not _PAD:
        return bool(copy.meta["val"].shape == source.meta["val"].shape)
    _, padding, *value = copy.args
    sizes = list(padding)  # type: ignore[arg-type]
    return len(sizes) == 2 * source.meta["val"].dim() and not any(sizes[:-1]) and sizes[-1] >= 0 and not any(value)


def _replace(graph: fx.Graph, node: fx.Node, gather: _Gather, *, first: bool) -> None:
    sent = list(_members(node.args[0]))
    value = node.meta["val"]
    args = (list(gather.shards), gather.dtype, list(gather.rows), gather.ranks, gather.group_name, first)
    with graph.inserting_before(node):
        launch = graph.call_function(GATHER_AHEAD, args)
        launch.meta = {**node.meta, "val": list(_members(value))}
        replacement = launch
        if not isinstance(value, (list, tuple)):
            replacement = graph.call_function(operator.getitem, (launch, 0))
            replacement.meta = dict(node.meta)
    node.replace_all_uses_with(replacement)
    graph.erase_node(node)
    for one in sent:
        erase_unread(graph, one, _COPIES)


def wait_late(graph: fx.Graph, names: Sequence[str]) -> None:
    """Let waits, in place, be put off by who runs the graph; those that are no plain waits are left as they are."""
    for node in graph.nodes:
        if node.name in names and node.target is torch.ops._c10d_functional.wait_tensor.default:
            node.target = WAIT_LATE
