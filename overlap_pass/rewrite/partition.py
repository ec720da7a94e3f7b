"""Joint graph → forward and backward graph, with ZeRO-3 kept."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition
from torch._prims.rng_prims import run_and_save_rng_state

from overlap_pass.rewrite.recompute import tag_gathers
from overlap_pass.rewrite.tied import fold_tied_reductions

__all__ = ["partition", "prepare_joint", "split"]


def prepare_joint(graph: fx.Graph) -> None:
    """What a joint graph needs before any partitioner sees it, in place."""
    fold_tied_reductions(graph)
    tag_gathers(graph)


def partition(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A ``partition_fn`` for AOTAutograd: :func:`prepare_joint`, then :func:`split`."""
    prepare_joint(joint.graph)
    return split(joint, joint_inputs, **options)


def split(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a prepared joint graph in two.

    Always the min-cut partitioner: the default one would save permuted copies of gathered parameters in spite of
    their tags.
    """
    forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **options)
    _order_saved_states(forward, backward)
    return forward, backward


def _order_saved_states(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Put saved states of random generators where AOTAutograd looks for them: among the tensors, in place.

    What the forward saves has an order: tensors, opaque objects, symbolic sizes. Where checkpointed ops are random, torch
    2.13 saves the state of a generator that is not CUDA's behind the opaque objects (the meshes of DTensor inputs), and
    AOTAutograd then takes a mesh for a tensor. Both graphs are given the right order.
    """
    output = next(iter(forward.graph.find_nodes(op="output")))
    values = list(output.args[0])
    states = [value for value in values if _is_generator_state(value)]
    placeholders = backward.graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if node.name.startswith("rng_state_output")]
    if not states or len(states) != len(inputs):
        return
    start = end = values.index(states[0])
    while start and _is_opaque(values[start - 1]):
        start -= 1
    if start == end:
        return
    behind = placeholders[placeholders.index(inputs[0]) - (end - start)]
    for node in inputs:
        behind.prepend(node)
    rest = [value for value in values[start:] if value not in states]
    output.args = ((*values[:start], *states, *rest),)
    forward.recompile()
    backward.recompile()


def _is_generator_state(value: object) -> bool:
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or value.args[1] != 0:
        return False
    return getattr(value.args[0], "target", None) is run_and_save_rng_state


def _is_opaque(value: object) -> bool:
    plain = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool, type(None))
    return isinstance(value, fx.Node) and not isinstance(value.meta.get("val"), plain)
