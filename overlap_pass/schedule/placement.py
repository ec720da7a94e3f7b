"""What may move in a program, and the one mechanism that turns wishes into a legal order.

Compute keeps its order. What moves is a collective with what belongs to it:

    shard ─ cast ─ pad ─▶ launch        wait ─ slice ─ view ─▶ first reader
    └────── head ──────┘                └────── tail ──────┘

The *head* follows the launch wherever it goes, the *tail* sinks to the first op that computes with the result.

A strategy gives a launch or wait a *key*; the order is the sort by key. Keys are made monotone along every
dependency first, so that a wish that the graph does not allow becomes the nearest one that it does, and sorting with
ties in the order as written is a topological sort.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from overlap_pass.graph.dag import DepGraph, EdgeKind, build_dag
from overlap_pass.graph.once import once
from overlap_pass.graph.program import Collective, OpKind, OpNode, Program, Role
from overlap_pass.schedule.types import Problem

__all__ = ["AFTER", "BEFORE", "WAITS", "Key", "Move", "Placement", "place"]

Key = tuple[int, int, int]
"""(position of an anchor in the order as written, rank at that anchor, tie)."""

_TIE_BITS = 40
BEFORE, WAITS, ANCHOR, AFTER = 0, 1, 2, 3
"""Ranks at an anchor: launches, then the waits that the anchor needs, the anchor, then what follows at once."""


@dataclass(frozen=True, slots=True)
class Move:
    """One collective that may move.

    Attributes:
        launch: position of the launch.
        waits: positions of its waits.
        release: first anchor position behind everything that the launch depends on (0: nothing but inputs).
        deadline: position of the first anchor that reads the result; the output's position if none computes with it.
        role: parameter gather, gradient reduction or activation collective (whose launch stays).
        group: communicator.
        head: positions of the casts and pads that go with the launch.
        after: positions of the launches whose results it sends on (HSDP: reduce-scatter, then all-reduce).
    """

    launch: int
    waits: tuple[int, ...]
    release: int
    deadline: int
    role: Role
    group: str
    head: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Placement:
    """Which ops of a program are anchors and which move, derived once per program."""

    dag: DepGraph

    @classmethod
    def of(cls, problem: Problem) -> Placement:
        """The problem's, derived once for all of its prices and budgets."""
        return once(problem.dag, Placement)

    @classmethod
    def of_program(cls, program: Program) -> Placement:
        """The program's, derived once."""
        return once(build_dag(program), Placement)

    def of_order(self, dag: DepGraph, order: Sequence[int]) -> Placement:
        """That of the program with its ops in another order, by their positions in this one: the same may move."""
        twin, free = Placement(dag), self.free
        vars(twin)["free"] = frozenset(new for new, position in enumerate(order) if position in free)
        return twin

    @property
    def program(self) -> Program:
        return self.dag.program

    @cached_property
    def free(self) -> frozenset[int]:
        """Positions of all ops that may leave their place: launches that may move, waits, heads and tails."""
        ops = self.program.ops
        launches = {p for p, op in enumerate(ops) if _launch_moves(op)}
        waits = {p for p, op in enumerate(ops) if op.kind is OpKind.WAIT}
        movable = [p for p, op in enumerate(ops) if _moves_data(op)]
        return frozenset(launches | waits | self._heads(movable, launches) | self._tails(movable, waits))

    @cached_property
    def anchors(self) -> tuple[int, ...]:
        """Positions of the ops that keep their order, ascending (inputs excluded)."""
        ops = self.program.ops
        return tuple(p for p in range(len(ops)) if p not in self.free and ops[p].kind is not OpKind.INPUT)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """Every collective, in the order as written."""
        return tuple(
            self._move(position, op.name, op.collective)
            for position, op in enumerate(self.program.ops)
            if op.collective is not None
        )

    @cached_property
    def resting(self) -> tuple[int, ...]:
        """For each op its key, packed, where nothing is wished: free ops as late as their readers allow."""
        ops = self.program.ops
        latest = _packed((len(ops) - 1, WAITS, 0))
        return tuple(
            _packed((-1, 0, 0)) if op.kind is OpKind.INPUT
            else latest if position in self.free
            else _packed((position, ANCHOR, 0))
            for position, op in enumerate(ops)
        )  # fmt: skip

    @cached_property
    def resting_keys(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The same as an array; only free ops ever get other keys."""
        return np.array(self.resting, dtype=np.int64)

    @cached_property
    def free_in_order(self) -> tuple[int, ...]:
        """``free``, ascending."""
        return tuple(sorted(self.free))

    @cached_property
    def free_edges_back(self) -> tuple[tuple[int, int, int], ...]:
        """Each free op, descending, with each of its direct successors and what the key of that is ahead of the waits before it."""
        one_rank, free, successors = _packed((0, ANCHOR, 0)) - _packed((0, WAITS, 0)), self.free, self.dag.successors
        return tuple(
            [
                (position, successor, 0 if successor in free else one_rank)
                for position in reversed(self.free_in_order)
                for successor in successors[position]
            ]
        )

    @cached_property
    def free_edges_on(self) -> tuple[tuple[int, int], ...]:
        """Each direct predecessor of each free op, ascending, with that; inputs come before all in any order."""
        ops, predecessors = self.program.ops, self.dag.predecessors
        return tuple(
            [
                (predecessor, position)
                for position in self.free_in_order
                for predecessor in predecessors[position]
                if ops[predecessor].kind is not OpKind.INPUT
            ]
        )

    def _move(self, position: int, name: str, collective: Collective) -> Move:
        program = self.program
        waits = tuple(program.index[wait] for wait in program.waits_of[name])
        head, after = self._upstream(position)
        return Move(
            launch=position,
            waits=waits,
            release=self._last_source[position] + 1,
            deadline=min((self._first_reader[wait] for wait in waits), default=len(program.ops) - 1),
            role=collective.role,
            group=collective.group,
            head=head,
            after=after,
        )

    def _upstream(self, launch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The free ops that lead to a launch, and the launches whose waits stand among them."""
        ops, index = self.program.ops, self.program.index
        head: set[int] = set()
        after: set[int] = set()
        todo = [launch]
        while todo:
            follower = todo.pop()
            for position in self.dag.predecessors[follower]:
                op = ops[position]
                if op.kind is OpKind.WAIT and op.launch is not None:
                    # Only a program with a limit has edges of that kind, and asking takes time.
                    limited = self.program.most_in_flight is not None
                    if not limited or self.dag.kinds(op.name, ops[follower].name) != {EdgeKind.IN_FLIGHT}:
                        after.add(index[op.launch])
                elif position in self.free and op.kind is not OpKind.LAUNCH and position not in head:
                    head.add(position)
                    todo.append(position)
        return tuple(sorted(head)), tuple(sorted(after))

    def first_reader(self, position: int) -> int:
        """Position of the first anchor that depends on an op through free ops alone; an anchor's is its own."""
        return self._first_reader[position]

    @cached_property
    def _first_reader(self) -> list[int]:
        """For each op, the earliest anchor that depends on it through free ops alone; an anchor is its own."""
        last = len(self.program.ops) - 1
        found = [last] * len(self.program.ops)
        free, successors = self.free, self.dag.successors
        for position in range(last, -1, -1):
            if position not in free:
                found[position] = position
            else:
                found[position] = min([found[s] for s in successors[position]], default=last)
        return found

    @cached_property
    def _last_source(self) -> list[int]:
        """For each op, the latest anchor that it depends on through free ops alone; -1 for inputs only."""
        ops = self.program.ops
        found: list[int] = []
        for position, op in enumerate(ops):
            if op.kind is OpKind.INPUT:
                found.append(-1)
            elif position not in self.free:
                found.append(position)
            else:
                found.append(max([found[p] for p in self.dag.predecessors[position]], default=-1))
        return found

    def _heads(self, movable: Sequence[int], launches: set[int]) -> set[int]:
        """Casts, pads and views that feed launches only."""
        heads = self._closure(reversed(movable), launches, self.dag.successors)
        return {p for p in heads if not any(self.program.ops[s].kind is OpKind.WAIT for s in self.dag.predecessors[p])}

    def _tails(self, movable: Sequence[int], waits: set[int]) -> set[int]:
        """Views, slices, casts and copies of what waits return: they read nothing else that was computed."""
        movable_waits = {p for p in waits if self._waits_for_shard(p)}
        views = [p for p in movable if self.program.ops[p].kind is OpKind.VIEW]
        before = self.dag.predecessors
        return self._closure(movable, movable_waits, before) | self._closure(views, waits, before)

    def _waits_for_shard(self, wait: int) -> bool:
        launch = self.program.ops[wait].launch
        collective = self.program.op(launch).collective if launch is not None else None
        return collective is not None and collective.role is not Role.ACTIVATION

    def _closure(self, movable: Iterable[int], seeds: set[int], neighbours: tuple[tuple[int, ...], ...]) -> set[int]:
        """Those all of whose neighbours (inputs aside) are seeds or members."""
        ops, members = self.program.ops, set(seeds)
        for position in movable:
            around = [n for n in neighbours[position] if n in members or ops[n].kind is not OpKind.INPUT]
            if around and members.issuperset(around):
                members.add(position)
        return members - seeds


def place(placement: Placement, wishes: Mapping[int, Key]) -> tuple[int, ...]:
    """The order of positions that fulfils the wishes as far as the graph allows.

    Args:
        wishes: position of a free op → where it should go. Free ops without a wish go as late as their readers allow.

    An anchor never moves: a wish too early is pushed behind what it depends on, one too late is pulled before its
    first reader.
    """
    keys = _wished(placement, wishes)
    _pull_before_readers(placement, keys)
    _push_behind_sources(placement, keys)
    found = placement.resting_keys.copy()
    found[list(placement.free_in_order)] = [keys[position] for position in placement.free_in_order]
    order: list[int] = found.argsort(kind="stable").tolist()
    return tuple(order)


def _packed(key: Key) -> int:
    """A key as one number of 64 bits in the same order; comparing numbers takes less time than comparing tuples."""
    anchor, rank, tie = key
    return ((anchor << 2 | rank) << _TIE_BITS) + tie


def _wished(placement: Placement, wishes: Mapping[int, Key]) -> list[int]:
    keys = list(placement.resting)
    for position, key in wishes.items():
        if position in placement.free:
            keys[position] = _packed(key)
    return keys


def _pull_before_readers(placement: Placement, keys: list[int]) -> None:
    """No free op behind what depends on it, backwards; before an anchor is among the waits that it needs."""
    for position, successor, ahead in placement.free_edges_back:
        # An anchor's key has no tie, and the rank of waits is the one below that of anchors.
        latest = keys[successor] - ahead
        if latest < keys[position]:
            keys[position] = latest


def _push_behind_sources(placement: Placement, keys: list[int]) -> None:
    """No free op before what it depends on, forwards. Never past a reader: those were keys along the same edges."""
    for predecessor, position in placement.free_edges_on:
        if keys[predecessor] > keys[position]:
            keys[position] = keys[predecessor]


def _launch_moves(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is not Role.ACTIVATION and not op.writes


def _moves_data(op: OpNode) -> bool:
    return op.moves_data and not (op.random or op.opaque or op.writes)
