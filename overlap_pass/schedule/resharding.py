"""Which gathered parameters stay from forward to backward: memory that is free buys gathers that need not run again.

Each parameter kept saves its second all-gather (and the casts before it) and holds its bytes from the forward to its last
reader in backward. What it saves is all of the gather's time where communication is what the backward is bound by; else the
time for which compute waits for it, and what it slows down the compute that hides it. Those that save most per byte come
first; as many as leave an order that fits the budget could be kept. Keeping all of them may leave too little to gather the
others ahead, so the two graphs are planned with several shares of them, and the shortest step is taken (ties: the fewest
bytes).

Peak and budget are those of the step: of forward and backward together, with what is held while only the other names it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpKind, Program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.ledger import peak, resident_bytes
from overlap_pass.memory.staging import gathers_bytes
from overlap_pass.schedule.coalescing import coalesce, groups_of
from overlap_pass.schedule.kept import Gathered, gathered_twice, keep_in_backward, keep_in_forward
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import least_bytes
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.types import Problem
from overlap_pass.simulate.engine import simulate
from overlap_pass.units import format_bytes, format_us

__all__ = ["Resharding", "choose_kept"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_QUICK = LatestStart(margin=1.5)
_QUICK_BYTES = 256 * 2**20
"""Launches of a unit are joined for the quick plans, which are the steadier for it."""
_RESERVE = 0.01
"""Share of the budget that nothing is kept in: the compiler still changes both graphs a little before they are planned."""


@dataclass(frozen=True, slots=True)
class Resharding:
    """The decision, and the budget that it was made for.

    Attributes:
        kept: launches of the forward whose results stay, most time saved per byte first.
        names: the kept parameters' names, as far as they are known.
        gathered: how many parameters both graphs would gather.
        kept_bytes: held for them between forward and backward.
        saved_us: what that is predicted to save in forward and backward together.
        budget_bytes: bound on the peak of the step, ``None`` for none.
    """

    kept: tuple[str, ...]
    names: tuple[str, ...]
    gathered: int
    kept_bytes: int
    saved_us: float
    budget_bytes: int | None

    def summary(self) -> str:
        """One line for a log or a report."""
        return (
            f"{len(self.kept)} of {self.gathered} gathered parameters stay from forward to backward "
            f"({format_bytes(self.kept_bytes)}, {format_us(self.saved_us)} predicted)"
        )


def choose_kept(
    forward: Program, backward: Program, hardware: Hardware, budget: Budget, *, asked: Collection[str] = ()
) -> Resharding:
    """Decide for the two graphs of a step, from what is the same on every rank.

    Args:
        forward, backward: the step with every parameter gathered twice.
        hardware: what both are priced for.
        budget: bound on the peak of the step.
        asked: launches whose results the user would keep (``reshard_after_forward=False``); a budget relative to the order
            as written is relative to that step.
    """
    step = _Step(forward, backward, hardware)
    user = [gather for gather in step.gathers if gather.launch in asked]
    budget_bytes = step.budget_bytes(budget, user)
    ranked = step.ranked(budget_bytes)
    limit_bytes = None if budget_bytes is None else budget_bytes - int(_RESERVE * budget_bytes)
    most = _most(step, ranked, limit_bytes)
    counts = [most] if limit_bytes is None else _counts(ranked[:most])
    steps_us = {count: step.planned_us(ranked[:count], limit_bytes) for count in dict.fromkeys((0, *counts))}
    best = min(counts, key=lambda count: (steps_us[count], count))
    kept: Sequence[Gathered] = ranked[:best]
    saved_us = steps_us[0] - steps_us[best]
    if budget_bytes is not None and step.smallest_bytes(kept) > budget_bytes >= step.smallest_bytes(user):
        # Gathers of a backward need staging memory, which may be more than keeping what the user keeps.
        kept, saved_us = user, steps_us[0] - step.planned_us(user, limit_bytes)
    names = [forward.op(gather.launch).collective for gather in kept]
    return Resharding(
        kept=tuple(gather.launch for gather in kept),
        names=tuple(name.parameter for name in names if name is not None and name.parameter is not None),
        gathered=len(ranked),
        kept_bytes=sum(gather.size_bytes for gather in kept),
        saved_us=saved_us,
        budget_bytes=budget_bytes,
    )


def _most(step: _Step, ranked: Sequence[Gathered], limit_bytes: int | None) -> int:
    """How many of the first can be kept such that some order fits, by bisection: each one more needs more."""
    if limit_bytes is None:
        return len(ranked)
    low, high = 0, len(ranked)
    while low < high:
        middle = (low + high + 1) // 2
        if step.smallest_bytes(ranked[:middle]) <= limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _counts(ranked: Sequence[Gathered]) -> list[int]:
    """How many of the first make up each share of the bytes of all."""
    filled = list(accumulate((gather.size_bytes for gather in ranked), initial=0))
    return sorted({bisect_right(filled, int(share * filled[-1])) - 1 for share in _SHARES})


class _Step:
    """Forward and backward, with any of the gathers kept."""

    def __init__(self, forward: Program, backward: Program, hardware: Hardware) -> None:
        self._forward, self._backward, self._hardware = forward, backward, hardware
        self.gathers = gathered_twice(forward, backward)

    def kept(self, gathers: Sequence[Gathered]) -> tuple[Program, Program]:
        forward, backward = keep_in_forward(self._forward, gathers), keep_in_backward(self._backward, gathers)
        return forward, replace(backward, shared_bytes=gathers_bytes(_joined(forward)))

    def ranked(self, budget_bytes: int | None) -> tuple[Gathered, ...]:
        """By time saved per byte held, then by first need in backward."""
        backward = self._backward
        beside_bytes = resident_bytes(self._forward, backward)
        left_bytes = None if budget_bytes is None else budget_bytes - beside_bytes
        costs = price(backward, self._hardware)
        order = _QUICK.schedule(Problem(build_dag(backward), costs, left_bytes)).order
        blocked_us = simulate(backward, costs, order).blocked_us
        hidden = _hidden_price(backward, costs)
        heads = {backward.ops[m.launch].name: m.head for m in Placement.of_program(backward).moves}

        def saved_us(gather: Gathered) -> float:
            waited_us = min(blocked_us[gather.launch], costs.duration_us[gather.launch])
            head_us = sum(costs.duration_us[backward.ops[position].name] for position in heads[gather.launch])
            return waited_us + hidden * (costs.duration_us[gather.launch] - waited_us) + head_us

        return tuple(sorted(self.gathers, key=lambda g: (-saved_us(g) / max(g.size_bytes, 1), g.used_at)))

    def budget_bytes(self, budget: Budget, kept: Sequence[Gathered]) -> int | None:
        """Bound on the step: the larger of the two graphs' bounds, each with all that the process holds."""
        forward, backward = self.kept(kept)
        first_bytes = budget.resolve(forward, peak(forward).peak_bytes)
        beside_bytes = resident_bytes(forward, backward)
        whole_bytes = peak(backward, resident_bytes=beside_bytes).peak_bytes
        second_bytes = budget.resolve(backward, whole_bytes)
        return None if first_bytes is None or second_bytes is None else max(first_bytes, second_bytes)

    def smallest_bytes(self, kept: Sequence[Gathered]) -> int:
        """Least peak of the step in any order that is known."""
        forward, backward = self.kept(kept)
        return max(least_bytes(forward), least_bytes(backward) + resident_bytes(forward, backward))

    def planned_us(self, kept: Sequence[Gathered], limit_bytes: int | None) -> float:
        """The step in the simulator, quickly planned."""
        forward, backward = self.kept(kept)
        beside_bytes = resident_bytes(forward, backward)
        left_bytes = None if limit_bytes is None else limit_bytes - beside_bytes
        return self._quick_us(forward, limit_bytes) + self._quick_us(backward, left_bytes)

    def _quick_us(self, program: Program, budget_bytes: int | None) -> float:
        joined = _joined(program)
        costs = price(joined, self._hardware)
        schedule = _QUICK.schedule(Problem(build_dag(joined), costs, budget_bytes))
        return simulate(joined, costs, schedule.order).step_us


def _joined(program: Program) -> Program:
    return coalesce(program, groups_of(program, _QUICK_BYTES))


def _hidden_price(program: Program, costs: CostTable) -> float:
    """What a microsecond of a hidden collective costs: all of it where a communicator has more to do than compute has."""
    busy_us: dict[str, float] = {}
    for op in program.launches:
        if op.collective is not None:
            lane = costs.lane_of(op.name, op.collective)
            busy_us[lane] = busy_us.get(lane, 0.0) + costs.duration_us[op.name]
    compute_us = sum(costs.duration_us[op.name] for op in program.ops if op.kind is OpKind.COMPUTE)
    if max(busy_us.values(), default=0.0) >= compute_us:
        return 1.0
    return 1.0 - 1.0 / costs.contention.compute_beside_communication
