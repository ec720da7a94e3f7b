"""Coalesced launches in an FX graph: the nodes behind ``schedule.coalescing``, in place."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx

from overlap_pass.errors import IllegalSchedule
from overlap_pass.schedule.coalescing import Group
from overlap_pass.transport import ops

__all__ = ["coalesce_nodes"]

_FUNCTIONAL = torch.ops._c10d_functional
_COALESCED = {
    _FUNCTIONAL.all_gather_into_tensor.default: _FUNCTIONAL.all_gather_into_tensor_coalesced.default,
    _FUNCTIONAL.reduce_scatter_tensor.default: _FUNCTIONAL.reduce_scatter_tensor_coalesced.default,
    ops.GATHER_START: ops.GATHER_START_COALESCED,
    ops.EXCHANGE_START: ops.EXCHANGE_START_COALESCED,
}


def coalesce_nodes(graph: fx.Graph, groups: Sequence[Group]) -> None:
    """Replace each group's launches by one coalesced launch and a ``getitem`` for each member.

    The new nodes have the names that the plan knows them by; they stand at the end of the graph until ``reorder``
    puts all nodes into the planned order.

    Raises:
        IllegalSchedule: a member is no launch of this graph, or its arguments differ from the first member's.
    """
    nodes = {node.name: node for node in graph.nodes}
    output = next(iter(graph.find_nodes(op="output")))
    for group in groups:
        members = [_member(nodes, name) for name in group.members]
        target, rest = members[0].target, members[0].args[1:]
        if target not in _COALESCED or any(m.target is not target or m.args[1:] != rest for m in members):
            raise IllegalSchedule(
                f"launches {', '.join(group.members)} cannot be coalesced: they differ in kind or group"
            )
        with graph.inserting_before(output):
            launch = _node(graph, group.launch, _COALESCED[target], ([m.args[0] for m in members], *rest))
            launch.meta = {**members[0].meta, "val": [m.meta["val"] for m in members]}
            for index, member in enumerate(members):
                part = _node(graph, group.part(member.name), operator.getitem, (launch, index))
                part.meta = dict(member.meta)
                member.replace_all_uses_with(part)
        for member in members:
            graph.erase_node(member)


def _member(nodes: dict[str, fx.Node], name: str) -> fx.Node:
    if name not in nodes:
        raise IllegalSchedule(f"the plan coalesces {name!r}, which this graph does not have")
    return nodes[name]


def _node(graph: fx.Graph, name: str, target: object, args: tuple[object, ...]) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=name)  # type: ignore[arg-type]
    if node.name != name:
        raise IllegalSchedule(f"the graph has a node called {name!r} already")
    return node
