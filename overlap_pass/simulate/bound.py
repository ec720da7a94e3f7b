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
4. The window before a fixed op holds what it depends on, the window behind it what depends on it.
5. All collectives that come before (behind) a fixed op gain at most what the compute before (behind) it can give them.
   A cast that leads to one collective only counts as before: put off behind the op, it drags its collective along and
   takes from it at least as much as it gives.

From them:

- *compute lane*, *communicator*, *wire*, *CPU lane*: the whole step as the window, by fact 2 alone.
- *chain*: the longest path through the dependency graph.
- *head and tail*: the whole step by facts 2, 3 and 5; for each fixed op the windows before and behind it, chained with
  all others by the dependencies between them; and for each lane as a single machine with release times r and tails
  q, the largest ``min r + sum of durations + min q`` over all sets of its ops, by Jackson's preemptive schedule
  (Carlier, 1982).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.program import OpKind, OpNode, Program, Role
from overlap_pass.simulate.loads import lane_loads
from overlap_pass.simulate.precedence import Precedence
from overlap_pass.simulate.windows import head_and_tail_us

__all__ = ["CPU_LANE", "Bound", "bound_by", "fixed_compute", "lower_bound", "step_bound_us"]

CPU_LANE = "CPU lane"


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
    return bound_by(Precedence(dag, costs, fixed_compute(dag.program) if fixed is None else fixed), dag.program, costs)


def bound_by(facts: Precedence, program: Program, costs: CostTable) -> Bound:
    """:func:`lower_bound` from facts that are known already, for several prices of one graph."""
    values = _values(facts, program, costs)
    values["chain"] = max(map(sum, zip(*facts.chains(), strict=True)), default=0.0)
    by = max(
        values, key=lambda name: (values[name], name != "head and tail")
    )  # what is simpler, where that says as much
    return Bound(values[by], by, values)


def step_bound_us(facts: Precedence, program: Program, costs: CostTable) -> float:
    """The bound alone, in less time: head and tail go along all chains, too."""
    return max(_values(facts, program, costs).values())


def _values(facts: Precedence, program: Program, costs: CostTable) -> dict[str, float]:
    """What each argument but the chains gives."""
    lanes = lane_loads(program, costs)
    # Kernels of launches and waits run somewhere on the compute lane; where, only the whole step need not ask.
    compute_us = facts.compute_us + sum(costs.kernel_us.values())
    values = {"compute lane": compute_us, CPU_LANE: max(0.0, sum(facts.launch_us) - facts.cpu_ahead_us)}
    for lane in lanes:
        gain_us = sum(job.gain_us for job in lane.jobs)
        name = "compute lane" if compute_us >= lane.total_us else lane.name
        values[name] = max(values.get(name, 0.0), lane.span_us(compute_us, lane.total_us, gain_us))
    factors = (costs.contention_of(op.name).compute_beside_communication for op in program.launches)
    values["head and tail"] = head_and_tail_us(facts, lanes, slowest=max(factors, default=1.0))
    return values


def fixed_compute(program: Program) -> tuple[str, ...]:
    """Names of the compute ops that no strategy moves on their own: all but what travels with a collective.

    That is what moves data only (pointwise, copies) and leads only to launches, or reads only inputs and what waits
    return; activation collectives take nothing with them.
    """
    ops, index = program.ops, program.index
    moving = [position for position, op in enumerate(ops) if op.moves_data]
    shards = {position for position, op in enumerate(ops) if _waits_for_shard(program, op)}
    tails: set[int] = set()
    for position in moving:
        computed = [source for name in ops[position].inputs if ops[source := index[name]].kind is not OpKind.INPUT]
        if computed and all(source in tails or source in shards for source in computed):
            tails.add(position)
    heads = {position for position, op in enumerate(ops) if _launch_moves(op)}
    for position in reversed(moving):
        if heads.issuperset(program.readers[position]):
            heads.add(position)
    return tuple(
        op.name for position, op in enumerate(ops)
        if op.kind is OpKind.COMPUTE and position not in tails and position not in heads
    )  # fmt: skip


def _launch_moves(op: OpNode) -> bool:
    return op.collective is not None and op.collective.role is not Role.ACTIVATION


def _waits_for_shard(program: Program, op: OpNode) -> bool:
    return op.kind is OpKind.WAIT and op.launch is not None and _launch_moves(program.op(op.launch))
