"""Keeping a budget exactly with a method that keeps it only about: what was too much is taken off and it tries again."""

from __future__ import annotations

from collections.abc import Callable

from overlap_pass.schedule.score import Score

__all__ = ["fit"]

_TRIES = 4


def fit(make: Callable[[int | None], tuple[int, ...]], budget_bytes: int | None, score: Score) -> tuple[int, ...]:
    """The order that ``make`` gives for the budget, or for the largest smaller one at which its exact peak keeps it.

    After a few tries the last order is returned though it may hold too much: the caller looks.
    """
    allowed_bytes = budget_bytes
    order: tuple[int, ...] = ()
    for _ in range(_TRIES):
        order = make(allowed_bytes)
        if budget_bytes is None or allowed_bytes is None:
            break
        over_bytes = score.peak_bytes(order) - budget_bytes
        if over_bytes <= 0:
            break
        allowed_bytes -= over_bytes
    return order
