"""Tied parameters in the joint graph: the gradients of all uses are added first and reduced once.

A parameter that is read at several places is gathered at each, and autograd makes a reduction for each, added behind::

    g1 ─ cast ─ reduce-scatter ─ wait ─┐                  g1 ─┐
                                       add ─▶     ⇒           add ─ cast ─ reduce-scatter ─ wait ─▶
    g2 ─ cast ─ reduce-scatter ─ wait ─┘                  g2 ─┘

Eager FSDP2 adds on the gathered parameter, before the cast: folding gives the same bits and saves a reduction. (The second
gather of the same shard is removed by the partitioner as a common subexpression.)
"""

from __future__ import annotations

import torch
import torch.fx as fx

from overlap_pass.graph.read import ANNOTATION

__all__ = ["fold_tied_reductions"]


def fold_tied_reductions(graph: fx.Graph) -> int:
    """Fold sums of equal reduction chains of one parameter, in place; returns how many reductions were saved."""
    folded = 0
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
            continue
        chains = [_chain(argument) for argument in node.args]
        first, second = chains
        if first is None or second is None or not _alike(first, second):
            continue
        _fold(graph, node, first, second)
        folded += 1
    return folded


def _note(node: fx.Node) -> object:
    return (node.meta.get("custom") or {}).get(ANNOTATION)


def _chain(end: object) -> list[fx.Node] | None:
    """The capture's ops from a gradient to ``end``, source first; ``None`` if that is no reduction of one gradient."""
    chain: list[fx.Node] = []
    node = end
    while isinstance(node, fx.Node) and node.op == "call_function" and _note(node) is not None:
        if len(node.users) != 1 or len(node.all_input_nodes) != 1:
            return None
        chain.append(node)
        node = node.all_input_nodes[0]
    reduces = any("reduce" in str(link.target) for link in chain)
    return [node, *reversed(chain)] if reduces and isinstance(node, fx.Node) else None


def _alike(first: list[fx.Node], second: list[fx.Node]) -> bool:
    """The same ops with the same constants, for the same parameter."""
    return len(first) == len(second) and all(
        a.target is b.target and _note(a) == _note(b) and _constants(a) == _constants(b)
        for a, b in zip(first[1:], second[1:], strict=True)
    )


def _constants(node: fx.Node) -> tuple[object, ...]:
    args = node.args
    if str(node.target).startswith("overlap_pass.add_held"):
        args = args[:-1]  # the number of the use
    arguments = (*args, *node.kwargs.items())
    return tuple(str(argument) for argument in arguments if not isinstance(argument, fx.Node))


def _fold(graph: fx.Graph, add: fx.Node, first: list[fx.Node], second: list[fx.Node]) -> None:
    sources = (first[0], second[0])
    with graph.inserting_before(add):
        total = graph.call_function(torch.ops.aten.add.Tensor, sources)
        total.meta = {**add.meta, "val": torch.ops.aten.add.Tensor(*(source.meta["val"] for source in sources))}
        current = total
        for link in first[1:]:
            before = link.all_input_nodes[0]
            current = graph.node_copy(link, {before: current}.__getitem__)
    add.replace_all_uses_with(current)
    graph.erase_node(add)
    for chain in (first, second):
        for link in reversed(chain[1:]):
            graph.erase_node(link)
