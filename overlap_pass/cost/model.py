"""Prices for the ops of a program: the table that the simulator and the strategies read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Contention", "CostTable"]


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


@dataclass(frozen=True)
class CostTable:
    """Price of each op.

    Attributes:
        duration_us: op name → microseconds alone on its lane. Views, inputs, waits and outputs cost 0.0. A compute op
            without a known price is priced by its memory traffic and listed in ``unknown``.
        launch_us: op name → microseconds of the CPU to launch it (0.0 where it launches nothing).
        contention: slow-down between lanes.
        unknown: names of ops that no formula covers.
        hardware: name of the hardware file used.
    """

    duration_us: Mapping[str, float]
    launch_us: Mapping[str, float]
    contention: Contention
    unknown: tuple[str, ...] = ()
    hardware: str = ""
