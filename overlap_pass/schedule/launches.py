"""What may be decided about launches besides their places: which become one, and what their order is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Coalesce", "LaunchOrder", "Launches"]

Coalesce = Literal["auto", "off"] | int
LaunchOrder = Literal["agreed", "priced"]


@dataclass(frozen=True, slots=True)
class Launches:
    """How launches may be joined and ordered.

    Attributes:
        coalesce: ``"off"``, ``"auto"`` (several sizes are tried) or bytes that a coalesced launch carries at least.
        order: ``"agreed"``, the same on ranks whose graphs differ in compute (``schedule.agreement``), or ``"priced"``, by this
            rank's prices, for ranks whose graphs have the same sizes.
    """

    coalesce: Coalesce = "auto"
    order: LaunchOrder = "agreed"

    @property
    def target_bytes(self) -> int | None:
        """The only size of coalesced launches to try; 0 for none, ``None`` for several."""
        if isinstance(self.coalesce, str):
            return None if self.coalesce == "auto" else 0
        return self.coalesce
