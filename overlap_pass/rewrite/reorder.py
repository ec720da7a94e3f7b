"""Put a graph's nodes into a new order, in place."""

from __future__ import annotations

import torch.fx as fx

from overlap_pass.errors import IllegalSchedule

__all__ = ["reorder"]


def reorder(graph: fx.Graph, order: tuple[str, ...]) -> None:
    """Relink the nodes of ``graph`` in ``order`` (node names, each once).

    Nodes are moved, not copied: metadata, users and names stay as they are.

    Raises:
        IllegalSchedule: the names are not exactly those of the graph.
    """
    nodes = {node.name: node for node in graph.nodes}
    if len(order) != len(nodes) or set(order) != set(nodes):
        raise IllegalSchedule(
            f"the plan orders {len(order)} ops, the graph has {len(nodes)}: it was planned for another graph"
        )
    if tuple(nodes) == order:
        return
    last = graph._root
    for name in order:
        last.append(nodes[name])
        last = nodes[name]
    graph.lint()
