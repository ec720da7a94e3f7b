"""Launches, waits and lanes as a constraint model: what the strategy ``exact`` solves.

Anchors (ops that keep their order) are numbered; the *slot* of a launch or wait is the anchor that it stands before.

- S(i), E(i): start and end of anchor i; S(i) ≥ E(i − 1) + the casts launched with at slot i + what follows its waits.
- A collective in slot l starts at E(l − 1) plus its casts or later, runs as long as it is priced, alone on its lane; of
  two on one lane the one that starts first has no later slot.
- A gather is waited for before its first reader: S(reader) ≥ its end. A reduction is waited for at a slot of choice.
- Beyond the tight order (``schedule.room``) an anchor may hold what the budget leaves: gathers launched ahead, inputs of
  reductions in flight, gradients not yet reduced (as in ``schedule.held``).

Slots are unary: a[i] says "the slot is i or before". The step is the end of the last of all.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_pass.graph.program import Role
from overlap_pass.schedule.placement import BEFORE, WAITS, Key, Move, Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.types import Problem
from overlap_pass.units import us_to_ns

__all__ = ["Model"]


@dataclass(slots=True)
class _Slot:
    """Where something stands, as unary variables.

    Attributes:
        first, last: the range of slots.
        reached: for each slot of ``range(first, last)`` a literal: the slot is that or before.
    """

    first: int
    last: int
    reached: Sequence[Any]

    def by(self, index: int) -> Any:
        """The literal (or 0 or 1) that it stands before anchor ``index`` or an earlier one."""
        if index < self.first:
            return 0
        return 1 if index >= self.last else self.reached[index - self.first]

    @property
    def number(self) -> Any:
        return self.last - sum(self.reached)


@dataclass(slots=True)
class _Job:
    move: Move
    slot: _Slot
    wait: _Slot | None
    start: Any
    length_ns: int
    head_ns: int
    lane: str

    @property
    def end(self) -> Any:
        return self.start + self.length_ns


class Model:
    """One problem as a model; ``cp_model`` is the module of OR-tools.

    Attributes:
        proved: the order found is the model's best.
    """

    def __init__(
        self, cp_model: Any, problem: Problem, placement: Placement, room: Room, allowed_bytes: int | None
    ) -> None:
        self._cp, self._problem, self._placement, self._room = cp_model, problem, placement, room
        self._model = cp_model.CpModel()
        self.proved = False
        self._horizon_ns = sum(self._ns(op.name) for op in problem.program.ops) + 1
        anchors = placement.anchors
        self._starts = [self._time(f"start {position}") for position in anchors]
        self._jobs = [self._job(move) for move in placement.moves]
        self._order_anchors()
        self._order_lanes()
        self._order_followers()
        if allowed_bytes is not None:
            self._bound_memory(allowed_bytes)
        step = self._time("step")
        for end in (self._end(len(anchors) - 1), *(job.end for job in self._jobs)):
            self._model.add(step >= end)
        self._model.minimize(step)

    def solve(self, effort: float) -> dict[int, Key] | None:
        """Wishes of the best order found (see ``placement.place``); ``None`` if none was."""
        solver = self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = effort
        status = solver.solve(self._model)
        if status not in (self._cp.OPTIMAL, self._cp.FEASIBLE):
            return None
        self.proved = status == self._cp.OPTIMAL
        moving = [job for job in self._jobs if job.move.role is not Role.ACTIVATION]
        moving.sort(key=lambda job: (solver.value(job.slot.number), solver.value(job.start), job.move.launch))
        anchors = self._placement.anchors
        wishes: dict[int, Key] = {}
        for sequence, job in enumerate(moving):
            slot = solver.value(job.slot.number)
            wishes[job.move.launch] = (anchors[slot], WAITS if job.move.after else BEFORE, sequence)
            if job.wait is not None:
                wait = anchors[solver.value(job.wait.number)]
                wishes.update(dict.fromkeys(job.move.waits, (wait, WAITS, sequence)))
        return wishes

    # -- variables

    def _ns(self, name: str) -> int:
        return us_to_ns(self._problem.costs.duration_us[name])

    def _time(self, name: str) -> Any:
        return self._model.new_int_var(0, self._horizon_ns, name)

    def _index(self, position: int) -> int:
        """The first anchor at a position or behind it."""
        anchors = self._placement.anchors
        return min(bisect_left(anchors, position), len(anchors) - 1)

    def _slot(self, first: int, last: int) -> _Slot:
        reached = [self._model.new_bool_var("") for _ in range(first, last)]
        for earlier, later in itertools.pairwise(reached):
            self._model.add_implication(earlier, later)
        return _Slot(first, last, reached)

    def _job(self, move: Move) -> _Job:
        op = self._problem.program.ops[move.launch]
        fixed = move.role is Role.ACTIVATION
        first = self._index(move.launch if fixed else move.release)
        last = first if fixed else max(first, self._index(move.deadline))
        reduces = move.role is Role.GRADIENT and bool(move.waits)
        head_ns = 0 if fixed else sum(self._ns(self._problem.program.ops[p].name) for p in move.head)
        slot = self._slot(first, last)
        wait = self._slot(first, last) if reduces else None
        if wait is not None:
            self._model.add(wait.number >= slot.number)
        lane = self._problem.costs.lane_of(op.name, op.collective) if op.collective is not None else ""
        return _Job(move, slot, wait, self._time(op.name), self._ns(op.name), head_ns, lane)

    def _end(self, index: int) -> Any:
        position = self._placement.anchors[index]
        op = self._problem.program.ops[position]
        return self._starts[index] + (0 if op.collective is not None else self._ns(op.name))

    # -- constraints

    def _order_anchors(self) -> None:
        model = self._model
        tails_ns = self._tails_ns()
        for index in range(len(self._starts)):
            heads_ns = sum(
                job.head_ns * (job.slot.by(index) - job.slot.by(index - 1)) for job in self._jobs if job.head_ns
            )
            before = self._end(index - 1) if index else 0
            model.add(self._starts[index] >= before + heads_ns + tails_ns[index])
        for job in self._jobs:
            if job.slot.first:
                model.add(job.start >= self._end(job.slot.first - 1) + job.head_ns)
            model.add(job.start >= job.head_ns)
            for offset, reached in enumerate(job.slot.reached):
                model.add(job.start >= self._end(job.slot.first + offset) + job.head_ns).only_enforce_if(~reached)
            self._wait(job, tails_ns)

    def _wait(self, job: _Job, tails_ns: Sequence[int]) -> None:
        if not job.move.waits:
            return
        last = self._index(job.move.deadline)
        self._model.add(self._starts[last] >= job.end + tails_ns[last])
        if job.wait is not None:
            for offset, reached in enumerate(job.wait.reached):
                self._model.add(self._starts[job.wait.first + offset] >= job.end).only_enforce_if(reached)

    def _tails_ns(self) -> list[int]:
        """Time of the slices and casts that stand between waits and each anchor."""
        placement = self._placement
        heads = {p for move in placement.moves for p in move.head}
        found = [0] * len(self._starts)
        for position in placement.free - heads:
            op = self._problem.program.ops[position]
            if op.collective is None:
                found[self._index(placement.first_reader(position))] += self._ns(op.name)
        return found

    def _order_lanes(self) -> None:
        lanes: dict[str, list[_Job]] = {}
        for job in self._jobs:
            lanes.setdefault(job.lane, []).append(job)
        for jobs in lanes.values():
            for first, second in itertools.combinations(jobs, 2):
                ahead = self._model.new_bool_var("")
                self._one_behind(first, second, ahead)
                self._one_behind(second, first, ~ahead)

    def _one_behind(self, first: _Job, second: _Job, literal: Any) -> None:
        self._model.add(second.start >= first.end).only_enforce_if(literal)
        self._model.add(second.slot.number >= first.slot.number).only_enforce_if(literal)

    def _order_followers(self) -> None:
        """What sends on another's result stands behind that one's wait."""
        by_launch = {job.move.launch: job for job in self._jobs}
        for job in self._jobs:
            for launch in job.move.after:
                source = by_launch[launch]
                self._model.add(job.start >= source.end)
                if source.wait is not None:
                    self._model.add(job.slot.number >= source.wait.number)

    def _bound_memory(self, allowed_bytes: int) -> None:
        for index, live_bytes in enumerate(self._room.live_bytes):
            extra = [self._held(job, index) for job in self._jobs if job.move.role is not Role.ACTIVATION]
            self._model.add(sum(extra) <= max(0, allowed_bytes - live_bytes))

    def _held(self, job: _Job, index: int) -> Any:
        """Bytes of a collective at an anchor, beyond the tight order."""
        ops = self._problem.program.ops
        op = ops[job.move.launch]
        if job.wait is None:
            size_bytes = op.written_bytes + (op.read_bytes if job.move.head else 0)
            return size_bytes * job.slot.by(index) if index < job.slot.last else 0
        launched, waited = job.slot.by(index), job.wait.by(index)
        held = op.read_bytes * (launched - waited)
        if index < self._index(self._room.wishes[job.move.launch][0]):
            return held
        waiting_bytes = ops[job.move.head[0] if job.move.head else job.move.launch].read_bytes
        return held + waiting_bytes * (1 - launched)
