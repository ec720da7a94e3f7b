"""A strategy of one's own: every gather so many ops ahead of its first reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.graph.program import Role
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import BEFORE, Placement, place
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec


@dataclass(frozen=True)
class Ahead:
    name: ClassVar[str] = "ahead"
    ops: int = 10

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement(problem.dag)
        wishes = {
            move.launch: (max(move.deadline - self.ops, 0), BEFORE, move.launch)
            for move in placement.moves
            if move.role is Role.PARAMETER
        }
        order = place(placement, wishes)
        names = tuple(problem.program.ops[position].name for position in order)
        return Schedule(spec(self), names, explain(placement, order, f"{self.ops} ops ahead"))
