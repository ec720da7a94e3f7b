"""``backward_post``: FSDP's frugal policy: the next unit is gathered when the current one has computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.prefetch import prefetch
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.schedule.units import Unit

__all__ = ["BackwardPost"]


@dataclass(frozen=True, slots=True)
class BackwardPost:
    """Gather unit *i + 1* behind the compute of unit *i*, as ``BackwardPrefetch.BACKWARD_POST`` does.

    The gather hides only under what is left of the current unit's reductions; one unit is gathered at a time.
    """

    name: ClassVar[str] = "backward_post"

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement.of(problem)
        order = self.order(placement)
        names = tuple(problem.program.ops[p].name for p in order)
        return Schedule(self.name, names, explain(placement, order, "behind the unit before"))

    def order(self, placement: Placement) -> tuple[int, ...]:
        """The order alone, by position."""
        return place(placement, prefetch(placement, self._launch_at))

    def _launch_at(self, units: tuple[Unit, ...], index: int) -> int:
        return units[index].start
