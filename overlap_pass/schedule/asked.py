"""A size of joined launches that was asked for: it is kept wherever the memory budget allows it, faster or not.

What a user writes down is not weighed against what the planner would have taken; where it cannot be kept, the plan says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.room import least_bytes
from overlap_pass.schedule.variants import Variant
from overlap_pass.units import format_bytes

__all__ = ["as_asked", "unheeded"]


def as_asked(found: Sequence[Variant], launches: Launches, budget_bytes: int | None) -> Sequence[Variant]:
    """What a plan may choose from: only what is joined to the size asked for, if some order of that fits the budget."""
    joined = found[1:] if launches.asked else ()
    fit = [one for one in joined if budget_bytes is None or least_bytes(one.problem.program) <= budget_bytes]
    return fit or found


def unheeded(
    found: Sequence[Variant], launches: Launches, chosen: Variant, budget_bytes: int | None
) -> tuple[str, ...]:
    """The note of a plan that does not join what it was asked to join.

    Args:
        found: what it could choose from, first the program as it came.
        budget_bytes: the whole budget, as the user knows it.
    """
    if not launches.asked or chosen.groups:
        return ()
    size = f"coalesce={format_bytes(launches.target_bytes or 0)}"
    if len(found) == 1:
        alone = len(found[0].problem.program.launches) < 2
        why = "none of this graph's launches may become one of that size (as_written joins none, FSDP's policies those of a unit)"
        return () if alone else (f"{size} joins nothing: {why}",)
    budget = "no bound" if budget_bytes is None else format_bytes(budget_bytes)
    return (
        f"{size} is not kept: launches joined to that size do not fit memory_budget ({budget}), so every parameter travels "
        "alone; a smaller size or a larger budget joins them",
    )
