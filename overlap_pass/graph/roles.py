"""Why a collective is there: parameter, gradient or activation traffic, told by what it depends on and leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overlap_pass.graph.program import Collective, CollectiveKind, OpKind, OpNode, Role

__all__ = ["assign_roles", "moves_data"]


def assign_roles(ops: Sequence[OpNode]) -> list[OpNode]:
    """The same ops with the role of each collective; its own reading of the dependencies is linear in the ops."""
    from_inputs = _depends_on_inputs_only(ops)
    to_output = _leads_to_output_only(ops)
    result = []
    for op in ops:
        if op.collective is not None:
            role = _role(op, op.collective, from_inputs, to_output)
            op = replace(op, collective=replace(op.collective, role=role))
        result.append(op)
    return result


def _role(op: OpNode, collective: Collective, from_inputs: set[str], to_output: set[str]) -> Role:
    reduces = collective.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
    if op.writes:
        return Role.ACTIVATION
    if collective.kind is CollectiveKind.ALL_GATHER and op.name in from_inputs:
        return Role.PARAMETER
    return Role.GRADIENT if reduces and op.name in to_output else Role.ACTIVATION


def moves_data(op: OpNode) -> bool:
    """Whether the op only casts, pads, cuts or hands on; so do launches and waits."""
    return op.category.moves_data and not (op.random or op.opaque or op.writes)


def _depends_on_inputs_only(ops: Sequence[OpNode]) -> set[str]:
    """Ops computed from graph inputs by casts, pads and copies alone, and gathers of those."""
    found: set[str] = set()
    for op in ops:
        hands_on = op.kind is not OpKind.WAIT and moves_data(op)
        if op.kind is OpKind.INPUT or (hands_on and all(name in found for name in op.inputs)):
            found.add(op.name)
    return found


def _leads_to_output_only(ops: Sequence[OpNode]) -> set[str]:
    """Ops whose result reaches the output through casts, slices and further reductions alone (or nothing at all)."""
    readers: dict[str, list[OpNode]] = {op.name: [] for op in ops}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op)
    found: set[str] = set()
    for op in reversed(ops):
        passes_on = op.kind in (OpKind.LAUNCH, OpKind.WAIT) or moves_data(op)
        reaches = all(r.kind is OpKind.OUTPUT or r.name in found for r in readers[op.name])
        if passes_on and reaches and op.kind is not OpKind.OUTPUT:
            found.add(op.name)
    return found
