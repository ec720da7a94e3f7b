"""How much memory a budget leaves over a stretch of the compute order."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.feeding import tight
from overlap_pass.schedule.placement import Placement, place

__all__ = ["Room"]


@dataclass(frozen=True)
class Room:
    """Bytes live at each anchor of the tight order (what any order that keeps the compute order must at least hold).

    Attributes:
        anchors: positions of the anchors, ascending.
        live_bytes: bytes live while each anchor runs, in the tight order, transients included.
        smallest_bytes: the peak of the tight order.
    """

    anchors: tuple[int, ...]
    live_bytes: tuple[int, ...]
    smallest_bytes: int

    @classmethod
    def of(cls, placement: Placement) -> Room:
        program = placement.program
        order = place(placement, tight(placement))
        profile = peak(program, tuple(program.ops[p].name for p in order))
        at = {position: step for step, position in enumerate(order)}
        live = tuple(profile.live_bytes[at[position]] for position in placement.anchors)
        return cls(placement.anchors, live, profile.peak_bytes)

    def left_bytes(self, budget_bytes: int | None, first: int, last: int) -> float:
        """Bytes under the budget at every anchor in ``[first, last)``; infinite without a budget."""
        if budget_bytes is None:
            return float("inf")
        low, high = bisect_left(self.anchors, first), bisect_left(self.anchors, last)
        return budget_bytes - max(self.live_bytes[low:high], default=0)
