"""FSDP units of a program: the gathers of one wrapped module, as the prefetch policies see them."""

from __future__ import annotations

from dataclasses import dataclass

from overlap_pass.graph.program import Role
from overlap_pass.schedule.placement import Move, Placement

__all__ = ["Unit", "units_in_use_order"]


@dataclass(frozen=True, slots=True)
class Unit:
    """One wrapped module within one graph.

    Attributes:
        name: qualified name, or the launch's own name where the graph does not tell.
        gathers: its parameter gathers, by first reader.
        start: position of the first anchor that reads one of them.
        end: position of the first anchor of the next unit (the output's for the last).
    """

    name: str
    gathers: tuple[Move, ...]
    start: int
    end: int


def units_in_use_order(placement: Placement) -> tuple[Unit, ...]:
    """Units sorted by first use. Gathers without a unit name are units of their own."""
    program = placement.program
    by_name: dict[str, list[Move]] = {}
    for move in placement.moves:
        if move.role is Role.PARAMETER:
            op = program.ops[move.launch]
            unit = op.collective.unit if op.collective is not None else None
            by_name.setdefault(op.name if unit is None else unit, []).append(move)
    ordered = sorted(
        ((min(m.deadline for m in moves), name, moves) for name, moves in by_name.items()), key=lambda entry: entry[:2]
    )
    ends = [*(start for start, _, _ in ordered), len(program.ops) - 1][1:]
    return tuple(
        Unit(name, tuple(sorted(moves, key=lambda m: (m.deadline, m.launch))), start, end)
        for (start, name, moves), end in zip(ordered, ends, strict=True)
    )
