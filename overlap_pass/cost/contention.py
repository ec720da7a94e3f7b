"""How much lanes slow each other down."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Contention"]


@dataclass(frozen=True, slots=True)
class Contention:
    """How much lanes slow each other down while they run at the same time; 1.0 is not at all.

    Attributes:
        compute_beside_communication: a compute op takes this many times longer while a collective runs.
        communication_beside_compute: a collective takes this many times longer while compute runs.
        communication_beside_communication: k collectives at once share the wire: each takes
            ``1 + (k - 1) * (this - 1)`` times longer.
    """

    compute_beside_communication: float = 1.0
    communication_beside_compute: float = 1.0
    communication_beside_communication: float = 1.0
