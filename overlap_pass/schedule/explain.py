"""Decisions of a schedule, read off the finished order: what moved, how far, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from overlap_pass.graph.once import once
from overlap_pass.graph.program import Role
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.types import Action, Decision

__all__ = ["explain", "told_again"]

_AGREED = "the order that all ranks share"


def explain(placement: Placement, order: tuple[int, ...], why: str) -> tuple[Decision, ...]:
    """One decision for each launch and each gradient's or activation's wait.

    ``moved_over`` counts the ops that do compute between the old and the new place.
    """
    program = placement.program
    before = once(placement, _anchors_before_as_written)
    after = _anchors_before(placement, order)
    decisions = []
    for move in placement.moves:
        watched = (move.launch,) if move.role is Role.PARAMETER else (move.launch, *move.waits)
        for position in watched:
            shift = after[position] - before[position]
            action = Action.HOIST if shift < 0 else Action.SINK if shift > 0 else Action.KEEP
            reason = _reason(placement, position, shift, why)
            decisions.append(Decision(program.ops[position].name, action, abs(shift), reason))
    return tuple(decisions)


def told_again(placement: Placement, order: tuple[int, ...], decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """Decisions made against another order of the same program, told against this placement's, with their reasons."""
    why = {decision.op: decision.reason.rpartition("; ")[2] for decision in decisions}
    told = explain(placement, order, "")
    return tuple(replace(one, reason=f"{one.reason}{why.get(one.op, _AGREED)}") for one in told)


def _reason(placement: Placement, position: int, shift: int, why: str) -> str:
    op = placement.program.ops[position]
    what = op.collective.parameter or op.collective.unit if op.collective is not None else None
    direction = "earlier" if shift < 0 else "later"
    moved = f"{abs(shift)} computations {direction}" if shift else "stays"
    return f"{what + ': ' if what else ''}{moved}; {why}"


def _anchors_before_as_written(placement: Placement) -> list[int]:
    return _anchors_before(placement, range(len(placement.program.ops)))


def _anchors_before(placement: Placement, order: range | tuple[int, ...]) -> list[int]:
    """By position, the number of anchors that run before it in ``order``."""
    anchors, at = np.zeros(len(order), dtype=np.int64), np.array(order, dtype=np.int64)
    anchors[list(placement.anchors)] = 1
    found = np.empty_like(anchors)
    found[at] = anchors[at].cumsum() - anchors[at]
    counts: list[int] = found.tolist()
    return counts
