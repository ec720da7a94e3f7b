"""ZeRO-3 in the joint graph: what was gathered for the forward is gathered again in backward, not saved.

Without a tag the partitioner saves gathered parameters as activations, which turns ZeRO-3 into ZeRO-2. The whole way of
a gathered parameter is tagged, from its shard to the last op that only reshapes, casts or slices it: a partitioner that
may save the permuted view saves the gathered memory with it. Which parameters stay is what the user told ``fully_shard``, or
what the budget allows (``rewrite.reshard``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from overlap_pass.graph.program import CollectiveKind, OpKind, Phase, Role
from overlap_pass.graph.read import ANNOTATION, read_program
from overlap_pass.graph.targets import collective_kind
from overlap_pass.schedule.placement import Placement

__all__ = ["asked_to_keep", "tag_gathers"]

_REGION = 100_000
"""``ac_graph_id`` of the tagged ops: above the user's own checkpoint regions, which torch counts from 0."""


def asked_to_keep(graph: fx.Graph) -> frozenset[str]:
    """Gathers whose result the user wants in backward, too (``reshard_after_forward=False``)."""
    gathers = (node for node in graph.nodes if collective_kind(node.target) is CollectiveKind.ALL_GATHER)
    return frozenset(node.name for node in gathers if not _note(node).get("reshard", True))


def tag_gathers(graph: fx.Graph, kept: Collection[str] | None = None) -> int:
    """Tag parameter gathers of a joint graph in place: saved for the backward or gathered again there.

    Args:
        kept: names of the launches whose results are saved; ``None`` for those that the user asked to keep.

    Returns:
        How many gathers were tagged.
    """
    program = read_program(graph, Phase.FORWARD, name="joint")
    if not program.launches:
        return 0
    kept = asked_to_keep(graph) if kept is None else kept
    placement = Placement.of_program(program)
    nodes = {node.name: node for node in graph.nodes}
    tagged = 0
    for move in placement.moves:
        if move.role is not Role.PARAMETER:
            continue
        launch = program.ops[move.launch]
        policy = CheckpointPolicy.MUST_SAVE if launch.name in kept else CheckpointPolicy.MUST_RECOMPUTE
        for position in (*move.head, move.launch, *move.waits, *_tail(placement, move.waits)):
            node = nodes[program.ops[position].name]
            saved_here = policy is CheckpointPolicy.MUST_SAVE and program.ops[position].kind is not OpKind.WAIT
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE if saved_here else policy
            node.meta["ac_graph_id"] = _REGION
        _note_padding(nodes[launch.name], [nodes[program.ops[position].name] for position in move.head])
        tagged += 1
    return tagged


def _note_padding(launch: fx.Node, head: list[fx.Node]) -> None:
    """Every rank pads here, if by no rows. Later a compiler may drop that, and the ranks could no longer tell."""
    if any(node.target is torch.ops.aten.constant_pad_nd.default for node in head):
        custom = launch.meta.get("custom") or {}
        launch.meta["custom"] = {**custom, ANNOTATION: {**custom.get(ANNOTATION, {}), "padded": True}}


def _note(node: fx.Node) -> dict[str, Any]:
    return (node.meta.get("custom") or {}).get(ANNOTATION) or {}


def _tail(placement: Placement, waits: tuple[int, ...]) -> list[int]:
    """Free ops behind the waits: the gathered parameter under its other names, shapes and dtypes."""
    found: list[int] = []
    todo = list(waits)
    seen: set[int] = set()
    while todo:
        for position in placement.dag.successors[todo.pop()]:
            if position in placement.free and position not in seen and not placement.program.ops[position].collective:
                seen.add(position)
                found.append(position)
                todo.append(position)
    return found
