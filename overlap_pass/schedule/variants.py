"""Which launches could be joined: the programs that a plan chooses from.

Joining neighbours of one unit saves starts; joining across units also saves latency where a collective takes longer to begin
than to run, as on hundreds of ranks. That is tried where it is predicted to pay: where all traffic together takes clearly less
time than with the units' own launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import CollectiveKind, Program, Role
from overlap_pass.schedule.coalescing import Group, apart, coalesce, groups_of
from overlap_pass.schedule.in_flight import hold_back
from overlap_pass.schedule.types import Problem
from overlap_pass.schedule.verify import violations

__all__ = ["Variant", "variants"]

_MIB = 2**20
_UNIT_BYTES = (8 * _MIB, 64 * _MIB, 256 * _MIB)
"""Below 8 MiB NVLink is not saturated."""
_ACROSS_BYTES = (64 * _MIB, 128 * _MIB)
_LARGE_BYTES = (512 * _MIB, 1024 * _MIB)
"""What hundreds of ranks need: a ring of 256 takes a millisecond to begin."""
_LARGE_SHARE = 8
"""A launch may be as large as that share of all that its communicator gathers or reduces; of fewer there is none to hide under."""
_PAYS = 0.95
"""Share of the traffic's time below which joining across units is tried."""


@dataclass(frozen=True)
class Variant:
    """The program with some launches joined, as a problem without a budget.

    Attributes:
        traffic_us: time of all its collectives.
    """

    groups: tuple[Group, ...]
    problem: Problem
    traffic_us: float

    @classmethod
    def of(cls, groups: tuple[Group, ...], joined: Program, price: Callable[[Program], CostTable]) -> Variant:
        costs = price(joined)
        traffic_us = sum(costs.duration_us[op.name] for op in joined.launches)
        return cls(groups, Problem(build_dag(joined), costs, None), traffic_us)


def variants(
    program: Program,
    price: Callable[[Program], CostTable],
    target_bytes: int | None = None,
    *,
    across_units: bool = True,
) -> tuple[Variant, ...]:
    """The program as it came, then its variants; the order is that of ties. What cannot be joined legally is left out.

    Args:
        price: prices of a program with joined launches.
        target_bytes: the only size to try, across units where nothing within one joins; ``None`` for several, 0 for none.
        across_units: whether launches of different units may become one.
    """
    as_came, *joined = _tried(program, price, target_bytes, across_units)
    return (as_came, *(v for v in joined if not violations(program, apart(v.problem.program.order, v.groups))))


def _tried(
    program: Program, price: Callable[[Program], CostTable], target_bytes: int | None, across_units: bool
) -> tuple[Variant, ...]:
    as_came = Variant.of((), program, price)

    def joined(groups: tuple[Group, ...]) -> Variant:
        together = coalesce(program, groups)
        return Variant.of(groups, hold_back(together) or together, price)  # which is then left out

    if target_bytes is not None:
        groups = groups_of(program, target_bytes) if target_bytes else ()
        if target_bytes and across_units and not groups:
            groups = groups_of(program, target_bytes, across=True)
        return (as_came, joined(groups)) if groups else (as_came,)
    inside = dict.fromkeys(groups_of(program, size) for size in _UNIT_BYTES)
    found = [as_came, *(joined(groups) for groups in inside if groups)]
    if not across_units:
        return tuple(found)
    least_us = min(variant.traffic_us for variant in found)
    large = (size for size in _LARGE_BYTES if size * _LARGE_SHARE <= _most_bytes(program))
    across = dict.fromkeys(groups_of(program, size, across=True) for size in (*_ACROSS_BYTES, *large))
    more = [joined(groups) for groups in across if groups and groups not in inside]
    return (*found, *(variant for variant in more if variant.traffic_us < _PAYS * least_us))


def _most_bytes(program: Program) -> int:
    """The most that one communicator carries of one kind."""
    carried: Counter[tuple[str, CollectiveKind]] = Counter()
    for op in program.launches:
        if op.collective is not None and op.collective.role is not Role.ACTIVATION:
            carried[op.collective.group, op.collective.kind] += op.collective.payload_bytes
    return max(carried.values(), default=0)
