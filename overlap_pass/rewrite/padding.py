"""Noting in the joint graph which gathers some rank pads for, while every rank can still see it."""

from __future__ import annotations

import torch
import torch.fx as fx

from overlap_pass.graph.program import CollectiveKind
from overlap_pass.graph.read import ANNOTATION
from overlap_pass.graph.targets import collective_kind

__all__ = ["note_padding"]


def note_padding(graph: fx.Graph) -> None:
    """Write ``padded`` into the capture's note on each gather of a padded shard, in place.

    Where one rank pads, the capture lets all of them pad, if by no rows. A compiler drops a pad of no rows, and from
    then on the ranks' graphs differ; the notes do not.
    """
    for node in graph.nodes:
        if collective_kind(node.target) is CollectiveKind.ALL_GATHER and _is_padded(node):
            custom = node.meta.get("custom") or {}
            if ANNOTATION in custom:
                node.meta["custom"] = {**custom, ANNOTATION: {**custom[ANNOTATION], "padded": True}}


def _is_padded(gather: fx.Node) -> bool:
    """The capture pads right before it gathers."""
    source = gather.args[0]
    return isinstance(source, fx.Node) and source.target is torch.ops.aten.constant_pad_nd.default
