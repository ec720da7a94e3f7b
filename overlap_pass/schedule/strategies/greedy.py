"""``greedy``: every gather as early as memory allows, every gradient reduced as soon as it exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.schedule.early import launch_early
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.fitting import fit
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["Greedy"]


@dataclass(frozen=True, slots=True)
class Greedy:
    """Looks at memory only (``schedule.early``), never at prices: what a cost model gets wrong cannot mislead it."""

    name: ClassVar[str] = "greedy"

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement.of(problem)
        room = Room.shared(problem)
        score = Score(problem)

        def early(allowed_bytes: int | None) -> tuple[int, ...]:
            return place(placement, launch_early(placement, room, allowed_bytes))

        order = fit(early, score)
        if not score.fits(score.peak_bytes(order)):
            order = room.order
        names = tuple(problem.program.ops[p].name for p in order)
        return Schedule(spec(self), names, explain(placement, order, "as early as memory allows"))
