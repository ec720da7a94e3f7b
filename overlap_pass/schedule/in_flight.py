"""A program that keeps its limit on communicators in flight as it stands, by waits that come earlier."""

from __future__ import annotations

from dataclasses import replace

from overlap_pass.errors import PlanError
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.in_flight import waited_before
from overlap_pass.graph.program import OpKind, Program

__all__ = ["hold_back", "kept_in_flight"]


def kept_in_flight(program: Program) -> Program:
    """The program with its waits moved up as far as its limit asks for; launches and compute keep their order.

    Raises:
        PlanError: a wait would have to cross an opaque op or a write.
    """
    held = hold_back(program)
    if held is None:
        raise PlanError(
            f"communicators_in_flight={program.most_in_flight}: graph {program.name!r} has more in flight across an operator "
            "that nothing may cross; allow more, or name the operator's namespace in pure_namespaces"
        )
    return held


def hold_back(program: Program) -> Program | None:
    """The same; ``None`` where it cannot be."""
    due = waited_before(program)
    if not due:
        return program
    sources = build_dag(replace(program, launches_fixed=False)).predecessors
    order: list[int] = []
    done: set[int] = set()

    def emit(position: int) -> None:
        if position not in done:
            done.add(position)
            order.append(position)

    def up(position: int) -> bool:
        """Emit a wait, and the views that pick a joined launch's parts for it."""
        for source in sources[position]:
            if source not in done and not (program.ops[source].kind is OpKind.VIEW and up(source)):
                return False
        emit(position)
        return True

    for position, op in enumerate(program.ops):
        if not all(up(program.index[wait]) for wait in due.get(op.name, ())):
            return None
        emit(position)
    return replace(program, ops=tuple(program.ops[position] for position in order))
