"""``backward_pre``: FSDP's default policy: the next unit is gathered before the current one computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.prefetch import prefetch
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.schedule.units import Unit
from overlap_pass.spec import spec

__all__ = ["BackwardPre"]


@dataclass(frozen=True, slots=True)
class BackwardPre:
    """Gather unit *i + depth* when unit *i* starts to compute, as ``BackwardPrefetch.BACKWARD_PRE`` does.

    The same rule is applied to forward graphs, where eager FSDP2 gets it from the CPU running ahead.
    The memory budget is checked by the caller: the policy itself knows only its depth.
    """

    name: ClassVar[str] = "backward_pre"
    depth: int = 1

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise OptionError(f"strategy backward_pre: depth={self.depth} must be 0 or more")

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement.of(problem)
        order = self.order(placement)
        names = tuple(problem.program.ops[p].name for p in order)
        return Schedule(spec(self), names, explain(placement, order, f"prefetch depth {self.depth}"))

    def order(self, placement: Placement) -> tuple[int, ...]:
        """The order alone, by position."""
        return place(placement, prefetch(placement, self._launch_at))

    def _launch_at(self, units: tuple[Unit, ...], index: int) -> int:
        return units[index - self.depth].start if index >= self.depth else 0
