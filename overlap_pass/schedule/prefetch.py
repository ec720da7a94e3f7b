"""The prefetch policies of eager FSDP as schedules of a graph: shared by ``backward_pre`` and ``backward_post``."""

from __future__ import annotations

from collections.abc import Callable

from overlap_pass.graph.program import Role
from overlap_pass.schedule.placement import AFTER, BEFORE, WAITS, Key, Move, Placement
from overlap_pass.schedule.units import Unit, units_in_use_order

__all__ = ["prefetch"]


def prefetch(placement: Placement, launch_at: Callable[[tuple[Unit, ...], int], int]) -> dict[int, Key]:
    """Wishes that launch each unit's gathers together, and reduce gradients as FSDP does.

    A gradient's reduction starts as soon as the gradient exists and is waited for when the next unit's first reduction
    starts: at most one unit's gradients are in flight.

    Args:
        launch_at: ``launch_at(units, index)`` → position before which unit ``index`` is gathered.
    """
    wishes: dict[int, Key] = {}
    units = units_in_use_order(placement)
    sequence = 0
    for index, unit in enumerate(units):
        at = launch_at(units, index)
        for move in unit.gathers:
            sequence += 1
            wishes[move.launch] = (min(at, move.deadline), BEFORE, sequence)
    for move, wait_at in _reductions(placement):
        sequence += 1
        wishes[move.launch] = (max(move.release - 1, 0), AFTER, sequence)
        wishes.update(dict.fromkeys(move.waits, (wait_at, WAITS, sequence)))
    return wishes


def _reductions(placement: Placement) -> list[tuple[Move, int]]:
    """Gradient reductions by release, each with the position at which the next unit's begin (else the output's)."""
    program = placement.program
    moves = sorted((m for m in placement.moves if m.role is Role.GRADIENT), key=lambda m: (m.release, m.launch))
    found: list[tuple[Move, int]] = []
    following, current, next_at = None, None, len(program.ops) - 1
    for move in reversed(moves):
        collective = program.ops[move.launch].collective
        unit = collective.unit if collective is not None else None
        if current is not None and (unit is None or unit != current):
            next_at = following if following is not None else next_at
        current, following = unit or "", move.release
        found.append((move, next_at))
    return found[::-1]
