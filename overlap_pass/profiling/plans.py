"""Plans that the backend makes while somebody listens, to be held against what is measured of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from overlap_pass.planning import Plan

__all__ = ["announce", "recorded_plans"]

_listeners: list[list[Plan]] = []
"""Not a context variable: backward graphs are compiled on a thread of the autograd engine."""


def announce(plan: Plan) -> None:
    """Tell all listeners of a plan that was made."""
    for plans in _listeners:
        plans.append(plan)


@contextlib.contextmanager
def recorded_plans() -> Iterator[list[Plan]]:
    """The plans that are made inside, in the order of compilation. A graph out of a compile cache is not planned."""
    plans: list[Plan] = []
    _listeners.append(plans)
    try:
        yield plans
    finally:
        _listeners.remove(plans)
