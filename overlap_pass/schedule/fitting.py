"""Keeping a budget exactly with a method that keeps it only about: what was too much is taken off and it tries again."""

from __future__ import annotations

import math
from collections.abc import Callable

from overlap_pass.schedule.score import Score

__all__ = ["fit"]

_TRIES = 4


def fit(make: Callable[[int | None], tuple[int, ...]], score: Score, best_us: float = math.inf) -> tuple[int, ...]:
    """The order that ``make`` gives for the budget, or for the largest smaller one at which its exact peak keeps it.

    After a few tries the last order is returned though it may hold too much: the caller looks. So is one that holds too much and
    still scores no better than ``best_us``: with less memory it would hardly be better.

    Args:
        score: the judge, with the budget.
    """
    allowed_bytes = budget_bytes = score.budget_bytes
    order: tuple[int, ...] = ()
    for _ in range(_TRIES):
        order = make(allowed_bytes)
        if budget_bytes is None or allowed_bytes is None:
            break
        over_bytes = score.peak_bytes(order) - budget_bytes
        if over_bytes <= 0 or (best_us < math.inf and score.below(order, best_us) >= best_us):
            break
        allowed_bytes -= over_bytes
    return order
