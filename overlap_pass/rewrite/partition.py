"""Joint graph → forward and backward graph, with ZeRO-3 kept."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition

from overlap_pass.rewrite.recompute import tag_gathers
from overlap_pass.rewrite.tied import fold_tied_reductions

__all__ = ["partition", "prepare_joint"]


def prepare_joint(graph: fx.Graph) -> None:
    """What a joint graph needs before any partitioner sees it, in place."""
    fold_tied_reductions(graph)
    tag_gathers(graph)


def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A ``partition_fn`` for AOTAutograd.

    Always the min-cut partitioner: the default one would save permuted copies of gathered parameters in spite of
    their tags.
    """
    prepare_joint(joint.graph)
    return min_cut_rematerialization_partition(joint, joint_inputs, **options)  # type: ignore[no-any-return]
