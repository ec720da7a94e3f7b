"""What may be decided about launches besides their places: which become one, and what their order is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from overlap_pass.graph.program import Program
from overlap_pass.schedule.in_flight import kept_in_flight

__all__ = ["Coalesce", "LaunchOrder", "Launches"]

Coalesce = Literal["auto", "off"] | int
LaunchOrder = Literal["agreed", "priced", "free"]


@dataclass(frozen=True, slots=True)
class Launches:
    """How launches may be joined and ordered.

    Attributes:
        coalesce: ``"off"``, ``"auto"`` (several sizes are tried) or bytes that a coalesced launch carries at least.
        order: ``"agreed"``, the same on ranks whose graphs differ in compute (``schedule.agreement``), or ``"priced"``, by this
            rank's prices, for ranks whose graphs have the same sizes; ``"free"`` is that with activation collectives that may
            change places with each other.
        most_in_flight: communicators with launches that are not waited for, at most; ``None`` for no limit.
        final_places: gathers by copy may put parameters where the peers fetch them from (``memory.leases``).
    """

    coalesce: Coalesce = "auto"
    order: LaunchOrder = "agreed"
    most_in_flight: int | None = None
    final_places: bool = True

    def bind(self, program: Program) -> Program:
        """The program with what its schedules have to keep, and may leave.

        Raises:
            PlanError: it cannot keep the limit.
        """
        free = self.order == "free"
        return kept_in_flight(replace(program, activations_free=free, most_in_flight=self.most_in_flight))

    @property
    def asked(self) -> bool:
        """Whether a size was asked for."""
        return not isinstance(self.coalesce, str)

    @property
    def target_bytes(self) -> int | None:
        """The only size of coalesced launches to try; 0 for none, ``None`` for several."""
        if isinstance(self.coalesce, str):
            return None if self.coalesce == "auto" else 0
        return self.coalesce
