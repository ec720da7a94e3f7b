"""``as_written``: the order of the graph as it came; the reference for every other strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.schedule.types import Problem, Schedule

__all__ = ["AsWritten"]


@dataclass(frozen=True, slots=True)
class AsWritten:
    """Moves nothing."""

    name: ClassVar[str] = "as_written"

    def schedule(self, problem: Problem) -> Schedule:
        return Schedule(self.name, problem.program.order)
