"""A lower bound on the step of every legal order, and which argument gives it.

It holds for each order that ``simulate`` can be given (with ``launch_after="issue"``) that respects the dependency graph
and keeps the *fixed* compute ops in their order as written. Fixed are all compute ops but those that travel with a
collective: casts, pads and copies that lead to launches only, or that read what waits return only (see
:func:`fixed_compute`). A caller whose orders keep less says so.

The facts that the proof stands on (``docs/cost-model.md`` spells it out):

1. An op placed later in the order starts no earlier than everything on the compute lane before it has ended; a launch
   likewise; what stands behind a wait starts after that collective has ended.
2. Let compute run at 1/c and communication at 1/k or less while both are active (the contention factors). In a
   window let C be the compute and K the collectives of one communicator that must run in it, in microseconds alone,
   and x the time both are active. The window lasts at least ``x + (C - x/c) + (K - x/k)``, which is ``C + K - g x``
   with the gain ``g = 1/c + 1/k - 1``; where g is negative, side by side is slower than one after the other.
3. A collective j cannot be active beside compute that it depends on or that depends on it. With W_j for the rest of
   the compute, its share of x is at most ``min(k K_j, c W_j)``, and x is at most ``c C``.

From them:

- *compute lane*, *communicator*, *wire*, *CPU lane*: the whole step as the window, with W_j without limit.
- *chain*: the longest path through the dependency graph.
- *head and tail*: for each fixed op i, its earliest start (the window before it: what it depends on; the chain to it;
  the CPU's issue) plus the least time from there to the end (the window behind it: what depends on it; the chain
  from it). And for each lane as a single machine with release times r and tails q, the largest
  ``min r + sum of durations + min q`` over all sets of its ops, by Jackson's preemptive schedule (Carlier, 1982).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.program import Category, OpKind, OpNode, Program, Role

__all__ = ["Bound", "fixed_compute", "lower_bound"]

_MOVES_DATA = (Category.NONE, Category.POINTWISE, Category.COPY)


@dataclass(frozen=True, slots=True)
class Bound:
    """No order takes less.

    Attributes:
        step_us: the bound, the largest of ``values``.
        by: the argument that gives it: ``"compute lane"``, ``"communicator g0"`` (or the name of a copy engine),
            ``"wire intra_node"``, ``"CPU lane"``, ``"chain"`` or ``"head and tail"``.
        values: what each argument gives, in microseconds.
    """

    step_us: float
    by: str
    values: Mapping[str, float]

    def gap_percent(self, step_us: float) -> float:
        """How much longer than the bound a step is."""
        return 100.0 * (step_us / self.step_us - 1.0) if self.step_us else 0.0


def lower_bound(dag: DepGraph, costs: CostTable, *, fixed: Collection[str] | None = None) -> Bound:
    """Bound the step from below, in time linear in ops and edges but for one sort.

    Args:
        dag: what must run before what.
        costs: prices and contention (factors of at least 1).
        fixed: compute ops that keep their relative order as written; default :func:`fixed_compute`. With ``()`` the
            bound holds for every legal order.
    """
    window = _Windows(_Facts(dag, costs, fixed_compute(dag.program) if fixed is None else fixed))
    facts = window.facts
    values = {"compute lane": facts.compute_us, "CPU lane": sum(facts.launch_us)}
    for lane in facts.lanes:
        gain_us = sum(job.gain_us for job in lane.jobs)
        name = "compute lane" if facts.compute_us >= lane.total_us else lane.name
        values[name] = max(values.get(name, 0.0), lane.span_us(facts.compute_us, lane.total_us, gain_us))
    values["chain"] = max(map(sum, zip(*facts.chains(), strict=True)), default=0.0)
    values["head and tail"] = window.head_and_tail_us()
    by = max(values, key=lambda name: values[name])
    return Bound(values[by], by, values)


def fixed_compute(program: Program) -> tuple[str, ...]:
    """Names of the compute ops that no strategy moves on their own: all but what travels with a collective.

    That is what moves data only (pointwise, copies) and leads only to launches, or reads only inputs and what waits
    return; activation collectives take nothing with them.
    """
    tails: set[str] = set()
    for op in program.ops:
        sources = [program.op(name) for name in op.inputs]
        computed = [source for source in sources if source.kind is not OpKind.INPUT]
        if _moves_data(op) and computed and all(s.name in tails or _waits_for_shard(program, s) for s in computed):
            tails.add(op.name)
    heads: set[str] = set()
    for op, readers in zip(reversed(program.ops), reversed(program.readers), strict=True):
        leads = (program.ops[reader] for reader in readers)
        if _moves_data(op) and all(lead.name in heads or _launch_moves(lead) for lead in leads):
            heads.add(op.name)
    return tuple(
        op.name for op in program.ops if op.kind is OpKind.COMPUTE and op.name not in tails and op.name not in heads
    )


def _moves_data(op: OpNode) -> bool:
    return op.kind is OpKind.VIEW or (op.kind is OpKind.COMPUTE and op.category in _MOVES_DATA)


def _launch_moves(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is not Role.ACTIVATION


def _waits_for_shard(program: Program, op: OpNode) -> bool:
    return op.kind is OpKind.WAIT and op.launch is not None and _launch_moves(program.op(op.launch))


@dataclass(frozen=True, slots=True)
class _Job:
    """One collective on a lane.

    Attributes:
        launch: its position.
        time_us: what it takes alone, K_j.
        gain: g of fact 2, or 0 where there is none to have.
        gain_us: ``g k K_j``, what running it beside compute can save at most.
    """

    launch: int
    time_us: float
    gain: float
    gain_us: float


@dataclass(frozen=True, slots=True)
class _LaneLoad:
    """Collectives that share a communicator or a wire.

    On a wire several may run at once, and n of them move ``n / (1 + (n - 1)(f - 1))`` times what one does. With the
    most that this can be as ``speedup``, all times are divided by it.

    Attributes:
        name: what a bound by this lane is called.
        jobs: the collectives.
        total_us: their times.
        gain_per_us: the most that a microsecond of compute can save beside them.
    """

    name: str
    jobs: tuple[_Job, ...]
    total_us: float
    gain_per_us: float
    speedup: float

    def span_us(self, compute_us: float, communication_us: float, gain_us: float) -> float:
        """Fact 2: least time for so much compute and communication, if at most ``gain_us`` is saved side by side."""
        return compute_us + communication_us - min(gain_us, self.gain_per_us * compute_us)


def _lane_load(name: str, launches: Sequence[OpNode], program: Program, costs: CostTable) -> _LaneLoad:
    at_once = len({costs.lane_of(op.name, op.collective) for op in launches if op.collective is not None})
    sharing = 1.0 + (at_once - 1) * (costs.contention.communication_beside_communication - 1.0)
    speedup = max(1.0, at_once / sharing)
    jobs, gains_per_us = [], [0.0]
    for op in launches:
        contention = costs.contention_of(op.name)
        slow, slowed = contention.compute_beside_communication, contention.communication_beside_compute
        gain = max(0.0, 1.0 / slow + 1.0 / slowed - 1.0)
        time_us = costs.duration_us.get(op.name, 0.0) / speedup
        jobs.append(_Job(program.index[op.name], time_us, gain, gain * slowed * time_us))
        gains_per_us.append(gain * slow)
    return _LaneLoad(name, tuple(jobs), sum(job.time_us for job in jobs), max(gains_per_us), speedup)


def _lanes(program: Program, costs: CostTable) -> tuple[_LaneLoad, ...]:
    """One for each lane that runs collectives, and one for each wire that several of them share."""
    by_lane: dict[str, list[OpNode]] = {}
    by_wire: dict[str, list[OpNode]] = {}
    for op in program.launches:
        if op.collective is not None:
            lane = costs.lane_of(op.name, op.collective)
            by_lane.setdefault(f"communicator {lane}" if lane == op.collective.group else lane, []).append(op)
            by_wire.setdefault(f"wire {costs.wires.get(op.collective.group, '')}".strip(), []).append(op)
    lanes = [_lane_load(name, launches, program, costs) for name, launches in by_lane.items()]
    wires = [_lane_load(name, launches, program, costs) for name, launches in by_wire.items()]
    return (*lanes, *(wire for wire in wires if wire.jobs not in [lane.jobs for lane in lanes]))


class _Facts:
    """The program in arrays by position, and what must run before and behind which fixed op.

    Fixed ops are numbered 0 to ``count - 1`` in the order as written (``rank``). ``after[v]`` is the last fixed op that
    precedes v in every order (-1: none), ``before[v]`` the first one that v precedes (``count``: none).
    """

    def __init__(self, dag: DepGraph, costs: CostTable, fixed: Collection[str]) -> None:
        program, names = dag.program, set(fixed)
        self.ops = program.ops
        self.predecessors, self.successors = dag.predecessors, dag.successors
        on_device = (OpKind.COMPUTE, OpKind.LAUNCH)
        self.duration_us = [costs.duration_us.get(o.name, 0.0) if o.kind in on_device else 0.0 for o in program.ops]
        self.launch_us = [costs.launch_us.get(op.name, 0.0) for op in program.ops]
        self.is_compute = [op.kind is OpKind.COMPUTE for op in program.ops]
        self.waits = {
            program.index[launch]: tuple(program.index[wait] for wait in waits)
            for launch, waits in program.waits_of.items()
        }
        self.launch_of = {wait: launch for launch, waits in self.waits.items() for wait in waits}
        self.fixed = [position for position, op in enumerate(program.ops) if op.name in names]
        self.rank = {position: rank for rank, position in enumerate(self.fixed)}
        self.compute_us = sum(us for us, counts in zip(self.duration_us, self.is_compute, strict=True) if counts)
        self.lanes = _lanes(program, costs)
        self.slowest = max(
            (costs.contention_of(op.name).compute_beside_communication for op in program.launches), default=1.0
        )
        self.after = self._after()
        self.before = self._before()

    def _after(self) -> list[int]:
        found: list[int] = []
        for position, predecessors in enumerate(self.predecessors):
            last = -1
            for predecessor in predecessors:
                last = max(last, self.rank.get(predecessor, found[predecessor]))
            found.append(self.rank[position] - 1 if position in self.rank else last)
        return found

    def _before(self) -> list[int]:
        found = [len(self.fixed)] * len(self.ops)
        for position in range(len(self.ops) - 1, -1, -1):
            if position in self.rank:
                found[position] = self.rank[position] + 1
                continue
            for successor in self.successors[position]:
                found[position] = min(found[position], self.rank.get(successor, found[successor]))
        return found

    def done_before(self, launch: int) -> int:
        """The first fixed op that starts only after this collective has ended; an order edge alone does not do."""
        return min((self.before[wait] for wait in self.waits[launch]), default=len(self.fixed))

    def chains(self, floor_us: Sequence[float] = (), rest_us: Sequence[float] = ()) -> tuple[list[float], list[float]]:
        """For each op the least time from the step's start to its own, and from there to the step's end.

        Args:
            floor_us, rest_us: by rank, the same for fixed ops from another argument; with them the fixed ops also
                form a chain.
        """
        return self._heads(floor_us), self._tails(rest_us)

    def _heads(self, floor_us: Sequence[float]) -> list[float]:
        ready: list[float] = []
        done: list[float] = []  # when what stands behind the op may start
        previous_us = 0.0
        for position, predecessors in enumerate(self.predecessors):
            start_us = max((done[p] for p in predecessors), default=0.0)
            if floor_us and position in self.rank:
                start_us = max(start_us, floor_us[self.rank[position]], previous_us)
                previous_us = start_us + self.duration_us[position]
            ready.append(start_us)
            if self.is_compute[position]:
                start_us += self.duration_us[position]
            elif position in self.launch_of:
                launch = self.launch_of[position]
                start_us = max(start_us, ready[launch] + self.duration_us[launch])
            done.append(start_us)
        return ready

    def _tails(self, rest_us: Sequence[float]) -> list[float]:
        left = [0.0] * len(self.ops)
        next_us = 0.0
        for position in range(len(self.ops) - 1, -1, -1):
            behind_us = max((left[s] for s in self.successors[position]), default=0.0)
            if position in self.waits:
                behind_us = max(behind_us, self.duration_us[position] + self.behind_wait_us(position, left))
            elif self.is_compute[position]:
                behind_us += self.duration_us[position]
            if rest_us and position in self.rank:
                behind_us = max(behind_us, rest_us[self.rank[position]], self.duration_us[position] + next_us)
                next_us = behind_us
            left[position] = behind_us
        return left

    def behind_wait_us(self, launch: int, left: Sequence[float]) -> float:
        """Least time from the end of a collective to the end of the step."""
        return max((left[wait] for wait in self.waits[launch]), default=0.0)


class _Windows:
    """Facts 2 and 3 for the windows before and behind each fixed op."""

    def __init__(self, facts: _Facts) -> None:
        self.facts = facts
        count = len(facts.fixed)
        before_us, after_us, issued_us = [0.0] * (count + 1), [0.0] * (count + 1), [0.0] * (count + 1)
        for position, duration_us in enumerate(facts.duration_us):
            issued_us[facts.rank.get(position, facts.before[position])] += facts.launch_us[position]
            if facts.is_compute[position]:
                before_us[facts.before[position]] += duration_us
                _add(after_us, facts.rank.get(position, facts.after[position]), duration_us)
        self.before_us = list(accumulate(before_us))
        """By rank: compute that has ended when the fixed op starts."""
        self.behind_us = _suffix_sums(after_us)
        """By rank: compute that starts with the fixed op or after it."""
        self.issued_us = list(accumulate(issued_us))
        """By rank: when the CPU has issued the fixed op, at the earliest."""

    def head_and_tail_us(self) -> float:
        facts = self.facts
        floor_us, rest_us, best_us = self._windows()
        ready, left = facts.chains(floor_us, rest_us)
        best_us = max(best_us, *map(sum, zip(ready, left, strict=True)), 0.0)
        compute = [position for position, counts in enumerate(facts.is_compute) if counts]
        behind = (max((left[s] for s in facts.successors[position]), default=0.0) for position in compute)
        best_us = max(
            best_us, _jackson_us((ready[p], facts.duration_us[p], q) for p, q in zip(compute, behind, strict=True))
        )
        for lane in facts.lanes:
            jobs = ((ready[job.launch], job.time_us, facts.behind_wait_us(job.launch, left)) for job in lane.jobs)
            best_us = max(best_us, _jackson_us(jobs))
        return best_us

    def _windows(self) -> tuple[list[float], list[float], float]:
        """By rank the least time before and from each fixed op, and that of the whole step."""
        facts, count = self.facts, len(self.facts.fixed)
        floor_us = list(map(max, self.issued_us, self.before_us))
        rest_us = list(self.behind_us)
        whole_us = facts.compute_us
        for lane in facts.lanes:
            needed, needed_gain = [0.0] * (count + 1), [0.0] * (count + 1)
            behind, behind_gain = [0.0] * (count + 1), [0.0] * (count + 1)
            total_gain_us = 0.0
            for job in lane.jobs:
                gain_us = min(job.gain_us, job.gain * self._beside_us(job.launch) / lane.speedup)
                total_gain_us += gain_us
                _add(needed, facts.done_before(job.launch), job.time_us)
                _add(needed_gain, facts.done_before(job.launch), gain_us)
                _add(behind, facts.after[job.launch], job.time_us)
                _add(behind_gain, facts.after[job.launch], gain_us)
            whole_us = max(whole_us, lane.span_us(facts.compute_us, lane.total_us, total_gain_us))
            spans = map(lane.span_us, self.before_us, accumulate(needed), accumulate(needed_gain))
            floor_us = list(map(max, floor_us, spans))
            spans = map(lane.span_us, self.behind_us, _suffix_sums(behind), _suffix_sums(behind_gain))
            rest_us = list(map(max, rest_us, spans))
        return floor_us, rest_us, whole_us

    def _beside_us(self, launch: int) -> float:
        """Fact 3: longest time that compute can run beside this collective: neither before its launch nor after it."""
        facts = self.facts
        after, done_before = facts.after[launch], facts.done_before(launch)
        before_us = 0.0 if after < 0 else self.before_us[after] + facts.duration_us[facts.fixed[after]]
        return max(0.0, facts.compute_us - before_us - self.behind_us[done_before]) * facts.slowest


def _add(sums: list[float], index: int, value: float) -> None:
    """Add at ``index``; -1 stands for "behind nothing" and counts nowhere."""
    if index >= 0:
        sums[index] += value


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


def _jackson_us(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Makespan of Jackson's preemptive schedule of ``(release, duration, tail)``: longest tail first.

    It equals the largest ``min release + sum of durations + min tail`` over all sets of jobs.
    """
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, int]] = []
    remaining: list[float] = []
    now = longest_us = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, duration, tail = waiting.pop()
            heapq.heappush(ready, (-tail, len(remaining)))
            remaining.append(duration)
        tail, job = ready[0]
        end_us = now + remaining[job]
        if waiting and waiting[-1][0] < end_us:
            remaining[job] = end_us - waiting[-1][0]
            now = waiting[-1][0]
        else:
            heapq.heappop(ready)
            now = end_us
            longest_us = max(longest_us, now - tail)
    return longest_us
