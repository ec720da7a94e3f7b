"""The numbers of a hardware file from measured times: least squares of relative errors, no number below zero.

Relative errors, because a plan adds up many small collectives and few large ones, and each should be right in its own
measure. Every model here is linear once a breakpoint is chosen, and has three unknowns at most: all subsets of them are
solved, and the best solution without a negative number is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from overlap_pass.cost.collectives import crossing_bytes
from overlap_pass.cost.hardware import Link
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Collective, CollectiveKind, Role

__all__ = ["CollectiveSample", "KernelSample", "fit_efficiency", "fit_link", "relative_error"]


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One measured collective.

    Attributes:
        kind, payload_bytes, ranks: as in :class:`~overlap_pass.graph.program.Collective`.
        ranks_per_node: members of its group on each node.
        time_us: of one, in a queue of them.
    """

    kind: CollectiveKind
    payload_bytes: int
    ranks: int
    ranks_per_node: int
    time_us: float

    @property
    def collective(self) -> Collective:
        return Collective(self.kind, "g0", self.ranks, self.payload_bytes, "", Role.ACTIVATION)

    @property
    def hops(self) -> int:
        return (2 if self.kind is CollectiveKind.ALL_REDUCE else 1) * (self.ranks - 1)


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One measured kernel: ``amount`` is its floating-point operations or the bytes it moves."""

    what: str
    amount: float
    time_us: float


def fit_link(samples: Sequence[CollectiveSample], prior: Link) -> Link:
    """Bandwidth, latency and saturation of the link inside a node.

    Args:
        samples: collectives of groups within one node, of at least three sizes.
        prior: where the time of a hop is taken from if all groups are of one size, since latency and hops are one then.

    Raises:
        PlanError: fewer than three samples, or times that do not grow with the size.
    """
    if len(samples) < 3:
        raise PlanError(f"{len(samples)} measured collectives cannot tell latency from bandwidth: measure three sizes")
    several = len({sample.ranks for sample in samples}) > 1
    if not _grow([(crossing_bytes(sample.collective), sample.time_us) for sample in samples]):
        raise PlanError("measured collectives take no longer the more they move, so no bandwidth can be told from them")
    crossing = [crossing_bytes(sample.collective) for sample in samples]
    best_error, best = float("inf"), prior
    for saturation_bytes in _breakpoints(crossing):
        rows = []
        for sample, moved_bytes in zip(samples, crossing, strict=True):
            known_us = 0.0 if several else prior.hop_us * sample.hops
            features = (1.0, max(moved_bytes, saturation_bytes), float(sample.hops) if several else 0.0)
            rows.append((features, max(sample.time_us - known_us, 1e-3), sample.time_us))
        error, (latency_us, per_byte_us, hop_us) = _least_squares(rows, needed=1)
        link = Link(
            bandwidth_gb_per_s=1e-3 / per_byte_us,
            latency_us=latency_us,
            hop_us=hop_us if several else prior.hop_us,
            saturation_mb=saturation_bytes / 1e6,
        )
        if error < 0.98 * best_error:  # a later breakpoint has to earn its place
            best_error, best = error, link
    return best


def fit_efficiency(samples: Sequence[KernelSample], peak_per_us: float) -> tuple[float, float]:
    """Share of the peak that large kernels reach, at most 1, and the start of each in microseconds.

    Args:
        samples: kernels of one sort.
        peak_per_us: what the datasheet promises of ``amount`` in a microsecond.

    Raises:
        PlanError: no samples, or times that do not grow with the amount.
    """
    rows = [((1.0, sample.amount / peak_per_us, 0.0), sample.time_us, sample.time_us) for sample in samples]
    if not rows:
        raise PlanError("no measured kernels to take an efficiency from")
    _, (start_us, slowdown, _) = _least_squares(rows, needed=1)
    if not _grow([(sample.amount, sample.time_us) for sample in samples]):
        raise PlanError("measured kernels take no longer the more they do, so no rate can be told from them")
    if slowdown < 1:  # faster than the datasheet: the start is what is left beside the peak
        return 1.0, max(0.0, median(sample.time_us - sample.amount / peak_per_us for sample in samples))
    return 1 / slowdown, start_us


def relative_error(pairs: Iterable[tuple[float, float]]) -> float:
    """Median of ``|model / measured − 1|`` over (model, measured) pairs."""
    return median(abs(model / measured - 1) for model, measured in pairs)


def _breakpoints(crossing: Sequence[float]) -> list[float]:
    """None, and four in each gap between two sizes; at least two sizes stay above."""
    sizes = sorted(set(crossing))
    pairs = pairwise(sizes[:-1])
    return [0.0, *(low * (high / low) ** (quarter / 4) for low, high in pairs for quarter in range(1, 5))]


def _grow(points: Sequence[tuple[float, float]]) -> bool:
    """The point of the largest amount takes longer than that of the smallest; so does a single one."""
    return len(points) == 1 or max(points)[1] > min(points)[1]


_Row = tuple[tuple[float, float, float], float, float]
"""Features, what they shall add up to, and the time whose inverse is the weight."""


def _least_squares(rows: Sequence[_Row], *, needed: int) -> tuple[float, tuple[float, float, float]]:
    """Coefficients of at least 0 with the least sum of squared relative errors; feature ``needed`` takes part."""
    best = (float("inf"), (0.0, 0.0, 0.0))
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            if needed not in chosen:
                continue
            solution = _solve(rows, chosen)
            if solution is None or min(solution) < 0:
                continue
            error = sum(
                ((sum(a * b for a, b in zip(features, solution, strict=True)) - target) / weight) ** 2
                for features, target, weight in rows
            )
            if error < best[0] * (1 - 1e-9):
                best = error, solution
    return best


def _solve(rows: Sequence[_Row], chosen: tuple[int, ...]) -> tuple[float, float, float] | None:
    """Normal equations by elimination; ``None`` where features depend on each other."""
    scale = {column: max(abs(features[column]) / weight for features, _, weight in rows) for column in chosen}
    if min(scale.values()) == 0:
        return None
    matrix = [
        [sum(f[one] * f[other] / (scale[one] * scale[other] * weight**2) for f, _, weight in rows) for other in chosen]
        + [sum(f[one] * target / (scale[one] * weight**2) for f, target, weight in rows)]
        for one in chosen
    ]
    for pivot in range(len(chosen)):
        if abs(matrix[pivot][pivot]) < 1e-9:
            return None
        for row in range(len(chosen)):
            if row != pivot:
                factor = matrix[row][pivot] / matrix[pivot][pivot]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
    found = [0.0, 0.0, 0.0]
    for index, column in enumerate(chosen):
        found[column] = matrix[index][-1] / matrix[index][index] / scale[column]
    return found[0], found[1], found[2]
