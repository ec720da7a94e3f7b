"""Ops in front of a collective that nothing reads any more once another has taken its place."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.fx as fx

__all__ = ["erase_unread"]


def erase_unread(graph: fx.Graph, node: Any, targets: Collection[object]) -> None:
    """Erase, in place, a node and what it alone reads, from the last to the first, while they are calls of ``targets``."""
    while isinstance(node, fx.Node) and not node.users and node.target in targets:
        source = node.args[0]
        graph.erase_node(node)
        node = source
