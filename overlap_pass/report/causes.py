"""Why a schedule brought nothing, from what was measured: the first cause that explains most of it comes first."""

from __future__ import annotations

from collections.abc import Iterator

from overlap_pass.report.comparison import Side
from overlap_pass.units import format_us, ns_to_us

__all__ = ["causes"]

_LITTLE = 0.03
"""A share of the step below which nothing is to be won."""
_MUCH = 0.10


def causes(before: Side, after: Side) -> tuple[str, ...]:
    """What stands between the scheduled step and a gain over the best baseline.

    Args:
        before, after: profiled steps of the baseline and of the schedule, on the same rank.

    Returns:
        A sentence each; empty where the figures show none of the known causes.
    """
    return tuple(_found(before, after))


def _found(before: Side, after: Side) -> Iterator[str]:
    one, two = before.stats, after.stats
    if one.exposed_ns < _LITTLE * one.step_ns:
        yield (
            f"nothing to hide: {before.label} exposes {_us(one.exposed_ns)} of communication in a step of "
            f"{_us(one.step_ns)}"
        )
    if two.idle_ns > _MUCH * two.step_ns:
        yield (
            f"CPU-bound: the device waits {_us(two.idle_ns)} of {_us(two.step_ns)} for launches; larger batches, fewer and "
            "larger collectives (coalesce) or mode='reduce-overhead' help, another order does not"
        )
    if two.communication_ns > two.compute_ns:
        yield (
            f"no compute to hide under: {_us(two.communication_ns)} of communication beside {_us(two.compute_ns)} of "
            "compute; more tokens a rank, or less to move (reshard, a larger group's shards) help"
        )
    slower_ns, hidden_ns = two.compute_ns - one.compute_ns, one.exposed_ns - two.exposed_ns
    if slower_ns > 0 and slower_ns >= hidden_ns > 0:
        yield (
            f"contention: {_us(hidden_ns)} more is hidden, and compute takes {_us(slower_ns)} longer beside it; a transport "
            "that needs no multiprocessor (transport='copy_engine') helps"
        )
    if two.exposed_ns > _MUCH * two.step_ns and two.communication_ns <= two.compute_ns:
        lanes = {row.lane for row in two.per_collective}
        queue = ", all on one communicator, one after the other" if len(lanes) == 1 else ""
        yield f"{_us(two.exposed_ns)} stay exposed though compute would cover them{queue}: the budget or the order bounds it"


def _us(time_ns: int) -> str:
    return format_us(ns_to_us(time_ns))
