"""The choice of a plan among orders that all ranks launch alike.

What decides about launches is the same on every rank: which are joined, and in which order they go
(``schedule.agreement``). Candidates are told apart at reference prices and by the memory of what travels. What is left,
where each launch stands, is chosen at this rank's prices in this rank's memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.once import once
from overlap_pass.graph.program import Program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.leases import leased
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.agreement import (
    COMPUTE_PER_TRAFFIC,
    added_bytes,
    agreed,
    reference_compute_us,
    reference_costs,
)
from overlap_pass.schedule.choice import Choice, choose
from overlap_pass.schedule.early import launch_at_once
from overlap_pass.schedule.explain import told_again
from overlap_pass.schedule.in_flight import hold_back, kept_in_flight
from overlap_pass.schedule.leasing import leaves_room, pays
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.strategies.backward_post import BackwardPost
from overlap_pass.schedule.strategies.backward_pre import BackwardPre
from overlap_pass.schedule.types import Problem, Schedule, Strategy
from overlap_pass.schedule.variants import Variant
from overlap_pass.simulate.engine import Simulator

__all__ = ["LOCAL", "Terms", "choose_alike"]

_SHARES = (1.0, 0.5, 0.25, 0.0)

_CLEARLY = 0.001
"""Shorter by less than this at reference prices is as likely longer at a rank's own."""

_NEAR = 0.01
"""Between two ways of joining whose steps at reference prices differ by less, what is added decides, where the budget bounds it:
what it leaves is what launches are placed in."""

_LEASED_AHEAD = (0, 1, 2)
"""How many launches earlier than in the agreed order places let a gather be made."""

_WORTH_MEMORY = 0.001
"""Steps at reference prices that differ by less are equal where places are chosen, and what adds least decides."""

LOCAL = (
    "the memory budget leaves no room for the order of launches that all ranks share, or for its places; the one that fits is "
    "shared by ranks whose graphs have the same sizes"
)
"""The note of a plan whose launches were ordered by local memory."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a plan has to keep.

    Attributes:
        budget: as the user said it.
        budget_bytes: what it leaves for this graph on this rank, ``None`` for no bound.
        asked: what may be joined is what was asked for, so it is joined wherever the budget allows it.
        final_places: gathers by copy may have leases (``memory.leases``).
    """

    strategy: Strategy
    budget: Budget
    budget_bytes: int | None
    asked: bool = False
    final_places: bool = True


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Launches joined as in ``variant``, in an order that they keep, and what that adds to the order as written.

    Attributes:
        costs: prices of its launches, if these have leases; else those of the variant are, which no order changes.
    """

    variant: Variant
    ordered: Program
    added_bytes: int = 0
    costs: CostTable | None = None


def choose_alike(found: Sequence[Variant], terms: Terms, price: Callable[[Program], CostTable]) -> Choice:
    """The strategy's best order among those whose launches every rank joins and orders in the same way.

    1. Each variant, with reductions where they were written and as soon as their input exists, with the largest share of the
       allowance that adds no more than the budget allows: the one that is best at reference prices (next to it: what adds least,
       then the fewest changes). Then all its shares, from what adds least on: the last that is clearly shorter than the one taken
       before it is the order of all ranks.
    2. That order with leases for its gathers by copy, if it is better at reference prices and adds no more than the budget
       allows.
    3. If neither fits on this rank, smaller shares, then the order as written, then that of least memory. These look at local
       memory, and :data:`LOCAL` says so.

    Args:
        found: the program as it came, then what its launches could be joined to.
    """
    written = found[0]
    bench = _Bench(written, terms, price)
    shared = bench.shared(found)
    best = bench.leased(shared)
    fitting = next(c for c in (best, shared, *_local(written, shared)) if _fits(c.ordered, terms))
    problem = Problem(build_dag(fitting.ordered), fitting.costs or price(fitting.ordered), None)
    ordered = replace(fitting.variant, problem=problem)
    chosen = choose([ordered], terms.strategy, terms.budget_bytes)
    notes = chosen.notes if fitting is best else (*chosen.notes, LOCAL)
    schedule = _against_written(chosen.schedule, fitting.variant.problem)
    return Choice(ordered if fitting.ordered.leases else fitting.variant, schedule, notes)


class _Bench:
    """Makes and judges candidates by what no rank sees differently."""

    def __init__(self, written: Variant, terms: Terms, price: Callable[[Program], CostTable]) -> None:
        self._written, self._strategy, self._asked = written, terms.strategy, terms.asked
        self._ahead, self._price = _LEASED_AHEAD if terms.final_places else (), price
        self._budget = terms.budget
        self._extra_bytes = terms.budget.extra_over_written(written.problem.program)
        self._known: dict[tuple[str, ...], list[float]] = {}
        self._travel_us = reference_compute_us(written.problem.program, written.problem.costs)

    def shared(self, found: Sequence[Variant]) -> _Candidate:
        """The order of all ranks: the best variant at the largest share, then what climbing its shares ends at."""
        first = [way for variant in found for way in itertools.islice(itertools.chain(*self._ways(variant)), 1)]
        if self._asked:
            first = [way for way in first if way.variant.groups] or first
        near = 0.0 if self._extra_bytes is None else _NEAR
        best = self._best(first or [_as_written(self._written)], near)
        if isinstance(self._strategy, BackwardPre | BackwardPost):
            return best
        written = [_as_written(self._written)] if best.variant is self._written else []
        return self._unmoved(self._climbed([*written, *itertools.chain(*self._ways(best.variant))]))

    def _climbed(self, found: Sequence[_Candidate]) -> _Candidate:
        """From what adds least on, each in the place of the one before where it is clearly shorter at reference prices.

        So a larger budget changes the order of launches only for one that these prices tell apart; a rank's own may still like it
        less.
        """
        best, *others = sorted(found, key=lambda candidate: candidate.added_bytes)
        for candidate in others:
            steps_us = self._steps_us(candidate, _launched(candidate)), self._steps_us(best, _launched(best))
            shares = [step / before for step, before in zip(*steps_us, strict=True) if before]
            if sum(shares) < len(shares) * (1.0 - _CLEARLY):
                best = candidate
        return best

    def leased(self, shared: _Candidate) -> _Candidate:
        """The order of all ranks with leases for its gathers by copy, if it is shorter so; else as it is."""
        if shared.ordered.leases:
            return shared
        return self._best([shared, *self._with_leases(shared.variant, shared.ordered)], _WORTH_MEMORY)

    def _with_leases(self, variant: Variant, ordered: Program) -> Iterator[_Candidate]:
        """An order with leases, with room for the most launches ahead first, as far as the budget allows it."""
        fitting: list[_Candidate] = []
        for ahead in self._ahead:
            program = leased(ordered, ahead)
            if not program.leases or not self._may_have(program):
                break
            costs = fitting[0].costs if fitting else self._price(program)  # which no place changes
            if costs is None or not pays(program, costs, variant.problem.costs):
                break
            fitting.append(_Candidate(variant, program, self._added_bytes(program), costs))
        yield from reversed(fitting)

    def _may_have(self, program: Program) -> bool:
        """Whether the budget, as far as it says what it adds, allows leases here and with the backward to come."""
        if self._extra_bytes is None:
            return True
        return not self._exceeds(self._added_bytes(program)) and leaves_room(program, self._budget, self._extra_bytes)

    def _unmoved(self, found: _Candidate) -> _Candidate:
        """The order as written, where launches keep their places in it: how far ahead they stand is not what is agreed on, and
        should not depend on the budget."""
        written = _as_written(self._written)
        if found.variant is not self._written or _launched(found) != _launched(written):
            return found
        kept = hold_back(written.ordered)
        return found if kept is None else replace(written, ordered=kept)

    def _ways(self, variant: Variant) -> list[Iterator[_Candidate]]:
        """The orders that add no more than the budget allows: with reductions where they were written, and as soon as they may."""
        return [self._allowed(variant, self._orders(variant, as_written=as_written)) for as_written in (True, False)]

    def _allowed(self, variant: Variant, orders: Iterator[Program]) -> Iterator[_Candidate]:
        for ordered in filter(None, map(hold_back, orders)):
            added = self._added_bytes(ordered)
            if not self._exceeds(added):
                yield _Candidate(variant, ordered, added)
            else:  # with leases it may hold less
                yield from self._with_leases(variant, ordered)

    def _added_bytes(self, ordered: Program) -> int:
        return added_bytes(self._written.problem.program, ordered)

    def _exceeds(self, added: int) -> bool:
        return self._extra_bytes is not None and added > self._extra_bytes

    def _orders(self, variant: Variant, *, as_written: bool) -> Iterator[Program]:
        """FSDP's own policies look at no price and no memory: their order is all ranks' as it is. Else smaller shares."""
        if isinstance(self._strategy, BackwardPre | BackwardPost):
            yield _fixed(variant, self._strategy.schedule(variant.problem).order)
        for share in _SHARES:
            yield agreed(variant.problem.program, share, as_written=as_written)

    def _best(self, found: Sequence[_Candidate], near: float = 0.0) -> _Candidate:
        """The one with the least sum of steps, each relative to the best one's, or of those so near to it that which adds least; ties
        to the first."""
        distinct: dict[tuple[str, ...], _Candidate] = {}
        for candidate in found:
            distinct.setdefault(_launched(candidate), candidate)
        candidates = list(distinct.values())
        if len(candidates) == 1:
            return candidates[0]
        steps_us = [self._steps_us(candidate, launches) for launches, candidate in distinct.items()]
        least_us = [min(column) for column in zip(*steps_us, strict=True)]
        scores = [sum(step / least for step, least in zip(row, least_us, strict=True) if least) for row in steps_us]
        near = min(scores) * (1.0 + near)
        ranked = (
            (way.added_bytes, score, place) if score <= near else (math.inf, score, place)
            for place, (score, way) in enumerate(zip(scores, candidates, strict=True))
        )
        return candidates[min(ranked)[2]]

    def _steps_us(self, candidate: _Candidate, launches: tuple[str, ...]) -> list[float]:
        """At each kind of step, with all launched as early as the order of launches lets it and waited for when needed."""
        if launches in self._known:
            return self._known[launches]
        program, costs = candidate.ordered, candidate.costs or candidate.variant.problem.costs
        placement = Placement.of_program(program)
        order = place(placement, launch_at_once(placement))
        steps_us = []
        for ratio in COMPUTE_PER_TRAFFIC:
            compute_us = {name: ratio * travel_us for name, travel_us in self._travel_us.items()}
            table = reference_costs(program, costs, compute_us)
            # Who starts first of a kernel and a collective is for kernels, which these prices do not tell apart: both ways.
            tables = [replace(table, recorded=recorded) for recorded in (False, True)[: 1 + table.recorded]]
            steps_us += [Simulator(program, one).step_us(order) for one in tables]
        self._known[launches] = steps_us
        return steps_us


def _launched(candidate: _Candidate) -> tuple[str, ...]:
    """Its launches in their order, with their places where these are settled."""
    leases = candidate.ordered.leases
    return tuple(
        f"{op.name} at {leases[op.name].offset_bytes}" if op.name in leases else op.name
        for op in candidate.ordered.launches
    )


def _as_written(written: Variant) -> _Candidate:
    return _Candidate(written, _fixed(written, written.problem.program.order))


def _fixed(variant: Variant, order: Sequence[str]) -> Program:
    program = variant.problem.program
    return replace(program, ops=tuple(program.op(name) for name in order), launches_fixed=True)


def _local(written: Variant, shared: _Candidate) -> Iterator[_Candidate]:
    """What may fit where the shared order does not; the last two are what any feasible budget allows."""
    program = written.problem.program
    for variant in (shared.variant, written) if shared.variant.groups else (written,):
        for share, as_written in itertools.product(_SHARES, (True, False)):
            ordered = hold_back(agreed(variant.problem.program, share, as_written=as_written))
            if ordered is not None:
                yield _Candidate(variant, ordered)
    yield _as_written(written)
    tight = tuple(program.ops[position].name for position in Room.shared(written.problem).order)
    yield _Candidate(written, kept_in_flight(_fixed(written, tight)))


def _fits(program: Program, terms: Terms) -> bool:
    budget_bytes = terms.budget_bytes
    if program.leases and not leaves_room(program, terms.budget, budget_bytes):
        return False
    if budget_bytes is None or peak(program).peak_bytes <= budget_bytes:
        return True
    return once(Placement.of_program(program), Room.of).smallest_bytes <= budget_bytes


def _against_written(schedule: Schedule, written: Problem) -> Schedule:
    """The schedule with its moves told against the order as written, in which the agreed one is a move already."""
    if schedule.strategy == AsWritten.name:
        schedule = Schedule("agreed", schedule.order)
    order = tuple(written.program.index[name] for name in schedule.order)
    return replace(schedule, decisions=told_again(Placement.of(written), order, schedule.decisions))
