"""Whether one system's steps are faster than another's, or only were so today.

Steps of one block share a clock rate, a temperature and neighbours on the network, so the block and not the step counts
as one observation. Systems are measured in turn (A B, B A, A B, …); each round gives one pair of block medians, and what
is estimated is the ratio of the pair.

The estimate is that of Hodges and Lehmann, the median of all means of two observations, with the interval that the
signed-rank test of Wilcoxon gives: exact for any symmetric distribution. Six rounds are the least that can reach 95 %;
from twelve on, one of them may go astray however far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from statistics import median

from overlap_pass.errors import PlanError

__all__ = ["CONFIDENCE", "Interval", "least_rounds", "location", "ratio"]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the interval around it.

    Attributes:
        value: the estimate.
        low, high: ends of the interval.
        confidence: probability with which such an interval covers the true value; below :data:`CONFIDENCE` where there
            are too few observations for more.
    """

    value: float
    low: float
    high: float
    confidence: float

    @property
    def conclusive(self) -> bool:
        """Enough observations for the confidence that was asked for."""
        return self.confidence >= CONFIDENCE


def location(values: Sequence[float]) -> Interval:
    """Hodges–Lehmann estimate of the centre of independent observations, with its signed-rank interval.

    Raises:
        PlanError: no observations.
    """
    if not values:
        raise PlanError("no observations to estimate from: measure at least one round")
    means = sorted((one + other) / 2 for one, other in combinations_with_replacement(values, 2))
    cut, confidence = _cut(len(values))
    return Interval(median(means), means[cut], means[-1 - cut], confidence)


def ratio(blocks: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Interval:
    """How many times as long the first system's steps take as the second's.

    Args:
        blocks, others: durations of at least one step for each round of the two systems, in the same order of rounds.
    """
    logs = [math.log(median(ours) / median(theirs)) for ours, theirs in zip(blocks, others, strict=True)]
    found = location(logs)
    return Interval(math.exp(found.value), math.exp(found.low), math.exp(found.high), found.confidence)


def least_rounds(confidence: float = CONFIDENCE) -> int:
    """Observations that are needed for an interval of this confidence.

    >>> least_rounds()
    6
    """
    return math.ceil(1 - math.log2(1 - confidence))


def _cut(observations: int) -> tuple[int, float]:
    """How many of the sorted means fall off at each end, and the confidence that is left.

    ``P(T ≤ k)`` of the signed-rank statistic is the share of all subsets of the ranks 1 … n whose sum is at most k.
    """
    ways = [1] + [0] * (observations * (observations + 1) // 2)
    for rank in range(1, observations + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    cut, tail = 0, ways[0]
    while 1 - 2 * (tail + ways[cut + 1]) / 2**observations >= CONFIDENCE:
        cut += 1
        tail += ways[cut]
    return cut, 1 - 2 * tail / 2**observations
