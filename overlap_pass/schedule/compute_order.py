"""Another order of compute: what nothing waits for fills the time in which the critical chain is blocked.

Tensor- and expert-parallel collectives stand in the middle of the chain from input to output; while one runs, compute that
depends on it stands still. Weight gradients (and shared experts) are in no such hurry. One pass of list scheduling over
the dependency graph, parameter gathers taken as hidden and reductions as free:

1. what leads to an activation collective is *critical* and runs as written; all other compute is *filler* and is put off;
2. where the next critical op is blocked, or so much filler has piled up that it reaches a limit of time or memory, the
   oldest filler runs;
3. where there is none either, a critical op behind the blocked one, if it is not too far ahead.

    as written   mm dW mm dW ░░░░░░ mm dW          ░ blocked on an all-reduce
    filled       mm mm dW dW ░░ mm dW …
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from overlap_pass.graph.once import keep, once
from overlap_pass.graph.program import OpKind, Role
from overlap_pass.memory.ledger import Ledger, Lifetimes
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.types import Problem

__all__ = ["ComputeOrders", "Filled", "Filling"]


@dataclass(frozen=True, slots=True)
class Filling:
    """How compute may move.

    Attributes:
        limit_us: how much filler may be put off.
        limit_bytes: filler runs first where more is alive; ``None`` for no limit.
        ahead_us: how much critical compute, as written, may be skipped to run what is behind it.
    """

    limit_us: float
    limit_bytes: int | None
    ahead_us: float


@dataclass(frozen=True, slots=True)
class Filled:
    """Another order of the ops: legal, gathers at their readers, reductions at once.

    Attributes:
        order: by position.
        timed: of these, the ops that keep their places among each other and take time.
        end_us: when its compute would end if gathers and reductions cost nothing.
        most_bytes: the most that was alive when the limit of memory was asked for; under no smaller one would it differ.
    """

    order: tuple[int, ...]
    timed: tuple[int, ...]
    end_us: float
    most_bytes: int


class ComputeOrders:
    """Other orders of compute of one problem, and the problems that they make: each made once for all budgets."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._facts = replace(problem, budget_bytes=None), _Facts(problem)
        self._filled: dict[Filling, Filled] = {}
        self._reordered: dict[tuple[int, ...], Problem] = {}

    @cached_property
    def compute_us(self) -> float:
        """All compute that keeps its place."""
        return sum(self._facts.duration[position] for position in self._facts.placement.anchors)

    @cached_property
    def as_written(self) -> tuple[int, ...]:
        """See :attr:`Filled.timed`."""
        return self._timed(range(len(self._facts.ops)))

    def _timed(self, order: Sequence[int]) -> tuple[int, ...]:
        facts = self._facts
        return tuple([p for p in order if facts.duration[p] > 0 and p not in facts.placement.free])

    def filled(self, filling: Filling) -> Filled:
        """The order that comes of a filling."""
        unlimited = replace(filling, limit_bytes=None)
        free = self._made(unlimited)
        within = filling.limit_bytes is None or free.most_bytes <= filling.limit_bytes
        return free if within else self._made(filling)

    def problem(self, filled: Filled, budget_bytes: int | None) -> Problem:
        """The problem with its ops in that order."""
        if filled.order not in self._reordered:
            moved = self._reordered[filled.order] = self._problem.reordered(filled.order)
            keep(moved.dag, Placement, self._facts.placement.of_order(moved.dag, filled.order))
        return replace(self._reordered[filled.order], budget_bytes=budget_bytes)

    def _made(self, filling: Filling) -> Filled:
        if filling not in self._filled:
            made = _Refill(self._facts, filling)
            order = tuple(made.run())
            self._filled[filling] = Filled(order, self._timed(order), made.now_us, made.most_bytes())
        return self._filled[filling]


class _Facts:
    """What every filling of one problem starts from.

    Attributes:
        critical: by position, whether it leads to an activation collective.
        on_demand: by position, whether it runs when its first reader does: gathers with their casts, waits and views.
        keeps_place: by position, whether it is critical and not on demand.
        fills: by position, whether it is compute that takes time.
        piles: by position, whether it is filler: that is put off.
        demands: by position, its sources that run on demand.
        missing: by position, how many sources must have run first; never 0 for what runs on demand.
        work_us: by position, all that stands before it as written.
    """

    def __init__(self, problem: Problem) -> None:
        self.placement = placement = Placement.of(problem)
        self.ops = placement.program.ops
        self.duration = [problem.costs.duration_us[op.name] for op in self.ops]
        self.before, self.behind = placement.dag.predecessors, placement.dag.successors
        self.critical, self.on_demand = self._leads_to_activations(), self._on_demand()
        on_demand = self.on_demand
        self.keeps_place = [critical and not late for critical, late in zip(self.critical, on_demand, strict=True)]
        self.fills = [op.kind is OpKind.COMPUTE and us > 0 for op, us in zip(self.ops, self.duration, strict=True)]
        self.piles = [fills and not critical for fills, critical in zip(self.fills, self.critical, strict=True)]
        self.demands = [tuple([s for s in found if on_demand[s]]) for found in self.before]
        self.missing = [
            len(self.ops) if late else sum([not on_demand[s] for s in found])
            for late, found in zip(on_demand, self.before, strict=True)
        ]
        self.work_us = list(itertools.accumulate(self.duration, initial=0.0))

    def _leads_to_activations(self) -> list[bool]:
        critical = [self._activates(position) for position in range(len(self.ops))]
        for position in range(len(self.ops) - 1, -1, -1):
            if critical[position]:
                for source in self.before[position]:
                    critical[source] = True
        return critical

    def _activates(self, position: int) -> bool:
        collective = self.ops[position].collective
        return collective is not None and collective.role is Role.ACTIVATION

    def _on_demand(self) -> list[bool]:
        inputs_only = [False] * len(self.ops)
        for position, op in enumerate(self.ops):
            if op.kind is not OpKind.INPUT and position in self.placement.free:
                sources = self.before[position]
                inputs_only[position] = all(inputs_only[s] or self.ops[s].kind is OpKind.INPUT for s in sources)
        return inputs_only


class _Refill:
    def __init__(self, facts: _Facts, filling: Filling) -> None:
        self.filling, self.facts = filling, facts
        self.missing = list(facts.missing)
        self.front = 0  # the first critical op that has not run
        self.lifetimes = once(facts.placement.program, Lifetimes)
        self.ledger = None if filling.limit_bytes is None else Ledger(self.lifetimes)
        self.asked: list[int] = []  # how many ops had run when memory was looked at
        self.order: list[int] = []
        self.now_us = 0.0
        self.free_us: dict[str, float] = {}  # communicator → when its last collective ends
        self.ready_us = [0.0] * len(facts.ops)  # when all that each reads exists, as far as it has run
        self.chain: list[int] = []
        self.filler: list[int] = []
        self.later: list[tuple[float, int]] = []  # ready but for a collective: (when it ends, op)
        self.piled_us = 0.0
        self.emitted = [False] * len(facts.ops)

    def run(self) -> list[int]:
        ops, last = self.facts.ops, len(self.facts.ops) - 1
        self.missing[last] = len(ops)  # the output waits for everything
        initial = [p for p, count in enumerate(self.missing) if not count]
        for position in initial:
            if ops[position].kind is OpKind.INPUT:
                self._emit(position)
        for position in initial:
            if ops[position].kind is not OpKind.INPUT:
                self._queue(position)
        while self.chain or self.filler or self.later:
            self._step()
        for position in range(last):
            self._demand(position)
        self._emit(last)
        return self.order

    def _step(self) -> None:
        chain, filler, later = self.chain, self.filler, self.later
        while later and later[0][0] <= self.now_us:
            self._queue(heapq.heappop(later)[1])
        on_time = bool(chain) and (not self.facts.critical[chain[0]] or chain[0] <= self._front())
        if filler and (not on_time or self._piled_too_high()):
            position = heapq.heappop(filler)
            self.piled_us -= self.facts.duration[position]
            self._run(position)
        elif chain and (on_time or not later or self._near(chain[0])):
            self._run(heapq.heappop(chain))
        else:
            self.now_us = later[0][0]

    def _front(self) -> int:
        """The first critical op, as written, that has not run."""
        front, last, emitted, keeps_place = self.front, len(self.emitted) - 1, self.emitted, self.facts.keeps_place
        while front < last and (emitted[front] or not keeps_place[front]):
            front += 1
        self.front = front
        return front

    def _near(self, position: int) -> bool:
        work_us = self.facts.work_us
        return work_us[position] - work_us[self.front] <= self.filling.ahead_us

    def _piled_too_high(self) -> bool:
        self.asked.append(len(self.order))
        limit_bytes = self.filling.limit_bytes
        heavy = self.ledger is not None and limit_bytes is not None and self.ledger.live_bytes > limit_bytes
        return heavy or self.piled_us > self.filling.limit_us

    def most_bytes(self) -> int:
        """See :class:`Filled`."""
        _, after = self.lifetimes.live_bytes(self.order)
        behind = np.concatenate(([self.lifetimes.start_bytes], after))
        return int(behind[self.asked].max()) if self.asked else 0

    def _queue(self, position: int) -> None:
        if self.facts.piles[position]:
            self.piled_us += self.facts.duration[position]
            heapq.heappush(self.filler, position)
        else:
            heapq.heappush(self.chain, position)

    def _run(self, position: int) -> None:
        facts = self.facts
        for source in facts.demands[position]:
            self._demand(source)
        collective = facts.ops[position].collective
        if collective is None:
            if facts.fills[position]:
                self.now_us += facts.duration[position]
            computes = facts.ops[position].kind is OpKind.COMPUTE
            self._emit(position, self.now_us if computes else self.ready_us[position])
        elif collective.role is Role.ACTIVATION:
            end_us = max(self.free_us.get(collective.group, 0.0), self.now_us) + facts.duration[position]
            self.free_us[collective.group] = end_us
            self._emit(position, end_us)
        else:
            self._emit(position)

    def _demand(self, position: int) -> None:
        """Run what is run on demand, sources first."""
        if self.emitted[position]:
            return
        before, emitted = self.facts.before, self.emitted
        todo = [position]
        while todo:
            top = todo[-1]
            if emitted[top]:
                todo.pop()
                continue
            sources = [s for s in before[top] if not emitted[s]]
            todo.extend(sources)
            if not sources:
                self._emit(todo.pop())

    def _emit(self, position: int, exists_us: float = 0.0) -> None:
        """The op is next; its result exists from ``exists_us`` on."""
        self.order.append(position)
        if self.ledger is not None:
            self.ledger.advance(position)
        self.emitted[position] = True
        if self.facts.on_demand[position]:
            return
        missing, ready_us, now_us = self.missing, self.ready_us, self.now_us
        for successor in self.facts.behind[position]:
            if exists_us > ready_us[successor]:
                ready_us[successor] = exists_us
            missing[successor] -= 1
            if not missing[successor]:
                if ready_us[successor] > now_us:
                    heapq.heappush(self.later, (ready_us[successor], successor))
                else:
                    self._queue(successor)
