"""Many plans of one model over tokens, ranks and budgets, and where communication disappears behind compute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["HIDDEN_PERCENT", "SCHEMA", "Point", "Series", "Sweep"]

SCHEMA = "overlap-pass/sweep/1"

HIDDEN_PERCENT = 5.0
"""Communication counts as hidden where no more than this share of the step is exposed: the first gather and the last
reduction have nothing to hide behind."""


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of a step.

    Attributes:
        tokens: tokens per rank and step.
        world_size: ranks.
        budget: the budget's spec.
        written_us, written_exposed_us: the step as written.
        step_us, exposed_us, peak_bytes, bound_us: the step as scheduled.
    """

    tokens: int
    world_size: int
    budget: str
    written_us: float
    written_exposed_us: float
    step_us: float
    exposed_us: float
    peak_bytes: int
    bound_us: float

    @property
    def exposed_percent(self) -> float:
        """Share of the scheduled step in which communication alone runs."""
        return _percent(self.exposed_us, self.step_us)

    @property
    def written_exposed_percent(self) -> float:
        return _percent(self.written_exposed_us, self.written_us)

    @property
    def gap_percent(self) -> float:
        return 100 * (self.step_us / self.bound_us - 1) if self.bound_us else 0.0

    def to_json(self) -> dict[str, Any]:
        derived = {"exposed_percent": self.exposed_percent, "written_exposed_percent": self.written_exposed_percent}
        return {**asdict(self), **derived, "gap_percent": self.gap_percent}


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """The points of one number of ranks and one budget, by tokens."""

    world_size: int
    budget: str
    points: tuple[Point, ...]

    @property
    def crossover_tokens(self) -> float | None:
        """Tokens from which on communication is hidden, read between the points on a logarithmic scale.

        ``None`` where it is hidden nowhere or the last point has it exposed again; the first point's where it is hidden
        everywhere.
        """
        shares = [point.exposed_percent for point in self.points]
        if not shares or shares[-1] > HIDDEN_PERCENT:
            return None
        last_exposed = max((n for n, share in enumerate(shares) if share > HIDDEN_PERCENT), default=-1)
        if last_exposed < 0:
            return float(self.points[0].tokens)
        before, behind = self.points[last_exposed], self.points[last_exposed + 1]
        way = (shares[last_exposed] - HIDDEN_PERCENT) / (shares[last_exposed] - shares[last_exposed + 1])
        return math.exp(math.log(before.tokens) * (1 - way) + math.log(behind.tokens) * way)

    @property
    def verdict(self) -> str:
        where = f"{self.world_size} ranks, budget {self.budget}"
        crossover = self.crossover_tokens
        if crossover is None:
            return f"{where}: not hidden at {self.points[-1].tokens} tokens a rank or fewer" if self.points else where
        if crossover <= self.points[0].tokens:
            return f"{where}: hidden from {self.points[0].tokens} tokens a rank or fewer on"
        return f"{where}: hidden from about {_rounded(crossover)} tokens a rank on"


def _rounded(number: float) -> int:
    """Two significant digits: the crossover is read off a line between two points."""
    unit = int(10 ** max(0, math.floor(math.log10(number)) - 1))
    return round(number / unit) * unit


@dataclass(frozen=True, slots=True)
class Sweep:
    """All points, with what they are of.

    Attributes:
        title: what was swept.
        setting: (name, value) pairs.
        points: in any order.
        refused: (what, why) of combinations that no plan fits.
    """

    title: str
    setting: tuple[tuple[str, str], ...]
    points: tuple[Point, ...]
    refused: tuple[tuple[str, str], ...] = ()

    @property
    def series(self) -> tuple[Series, ...]:
        keys = dict.fromkeys((point.world_size, point.budget) for point in self.points)
        return tuple(Series(*key, _by_tokens(self.points, *key)) for key in keys)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "title": self.title,
            "setting": [list(pair) for pair in self.setting],
            "hidden_percent": HIDDEN_PERCENT,
            "points": [point.to_json() for point in self.points],
            "crossover": [
                {"world_size": s.world_size, "budget": s.budget, "tokens": s.crossover_tokens} for s in self.series
            ],
            "refused": [list(pair) for pair in self.refused],
        }


def _by_tokens(points: Sequence[Point], world_size: int, budget: str) -> tuple[Point, ...]:
    found = [point for point in points if (point.world_size, point.budget) == (world_size, budget)]
    return tuple(sorted(found, key=lambda point: point.tokens))
