"""What every registered strategy promises, on random FSDP-like programs.

Scenarios and cases of ``../shared/scenarios/CASES.md`` that are the planner's, and where they are tried (``test_scenarios``
and ``test_backend_order`` are in ``tests/cpu``)::

    S06 B23  no bound, a bound of nothing    test_scenarios; here "keeps its budget", launches joined
    S07 B24  the peak inside an op           test_scenarios; test_memory
    S28 B24  predicted is measured           test_scenarios (exactly)
    S09 B25  so many gathers ahead           test_scenarios; test_strategies "depth of two"
    S12 B18  two communicators               test_scenarios; test_in_flight; test_agreement
    S14 B44  symbolic sizes                  test_scenarios
    S17 B48  long graphs                     test_scenarios; here "moves nothing else"; growth: tests.bench.scale, no timed test
    S20 B51  measuring overlap               test_scenarios; test_stats
    S21 B32  one communicator, one at a time test_scenarios; test_simulate
    S24 B31  a view pins no wait             test_scenarios; test_strategies
    S27 B20  hash seeds                      test_scenarios; here
    S36 B41  the only room                   test_scenarios
    S31 B26  gathered and saved              test_scenarios; test_backend_order
        B30  reserved memory                 test_verification "reserved memory too"; retries are not counted
        B27 to B29                           are not in that list
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Category, OpKind, Program
from overlap_pass.memory.budget import Absolute, Unlimited
from overlap_pass.memory.ledger import peak
from overlap_pass.planning import make_plan
from overlap_pass.registry import parse, registry
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.placement import BEFORE, Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import CLOSE, Score
from overlap_pass.schedule.types import Problem, Schedule, Strategy
from overlap_pass.schedule.verify import violations
from tests.pure.programs import Builder, fsdp_programs, priced

ROOT = Path(__file__).parents[2]
H100 = load_hardware("h100")
SCALE = 2**20
PRICED = Launches(order="priced")
"""With launches in the order of all ranks, one rank's prices promise less: see ``test_agreement``."""
BLIND = ("as_written", "backward_post", "backward_pre")
"""Strategies that do not look at the budget: ``make_plan`` keeps it for them."""

SPECS = [
    {"local_search": "local_search{evaluations=12}"}.get(name, name)
    for name in registry().names
    if name != "exact" or find_spec("ortools") is not None
]


@dataclass(frozen=True)
class AllAtOnce:
    """Somebody else's strategy, which knows neither prices nor memory: every gather at the very start."""

    name: ClassVar[str] = "all_at_once"

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement(problem.dag)
        first = placement.anchors[0]
        order = place(placement, {move.launch: (first, BEFORE, 0) for move in placement.moves})
        return Schedule(self.name, tuple(problem.program.ops[position].name for position in order))


every_strategy = pytest.mark.parametrize("strategy", [*map(parse, SPECS), AllAtOnce()], ids=lambda s: s.name)


def large(program: Program) -> Program:
    """The program with MiB for bytes and work for its matmuls, so that a real cost model has something to hide."""
    ops = tuple(
        replace(
            op,
            flops=10**10 if op.kind is OpKind.COMPUTE else 0,
            read_bytes=op.read_bytes * SCALE,
            written_bytes=op.written_bytes * SCALE,
            collective=None
            if op.collective is None
            else replace(op.collective, payload_bytes=op.collective.payload_bytes * SCALE),
        )
        for op in program.ops
    )
    storages = tuple(replace(storage, size_bytes=storage.size_bytes * SCALE) for storage in program.storages)
    return replace(program, ops=ops, storages=storages)


def smallest(program: Program) -> int:
    return min(Room.of(Placement(build_dag(program))).smallest_bytes, peak(program).peak_bytes)


@every_strategy
@given(data=st.data())
@settings(max_examples=25)
def test_the_order_is_legal(strategy: Strategy, data) -> None:
    program, costs = data.draw(priced())
    problem = Problem(build_dag(program), costs, data.draw(st.none() | st.integers(0, 200)))
    assert violations(program, strategy.schedule(problem).order) == ()


@pytest.mark.parametrize("strategy", [parse(text) for text in SPECS if text not in BLIND], ids=lambda s: s.name)
@given(data=st.data())
@settings(max_examples=25)
def test_the_peak_keeps_every_budget_that_the_tight_order_keeps(strategy: Strategy, data) -> None:
    program, costs = data.draw(priced())
    dag = build_dag(program)
    budget_bytes = Room.of(Placement(dag)).smallest_bytes + data.draw(st.integers(0, 40))
    order = strategy.schedule(Problem(dag, costs, budget_bytes)).order
    assert peak(program, order).peak_bytes <= budget_bytes


@every_strategy
@given(data=st.data())
@settings(max_examples=15)
def test_a_plan_is_never_worse_than_as_written_and_keeps_its_budget(strategy: Strategy, data) -> None:
    program = large(data.draw(fsdp_programs()))
    budget_bytes = max(peak(program).peak_bytes + data.draw(st.integers(0, 30)) * SCALE, 1)
    plan = make_plan(program, H100, strategy, Absolute(budget_bytes), launches=PRICED)
    assert plan.after.step_us <= plan.before.step_us
    assert plan.memory_after.peak_bytes <= budget_bytes
    assert plan.after.step_us >= plan.bound.step_us * (1 - 1e-9)


@pytest.mark.parametrize("strategy", ["latest_start", "fill_gaps"])
@given(data=st.data())
@settings(max_examples=25)
def test_the_default_is_no_longer_than_a_policy_of_eager_fsdp_that_fits(strategy: str, data) -> None:
    program, costs = data.draw(priced())
    dag = build_dag(program)
    problem = Problem(dag, costs, Room.of(Placement(dag)).smallest_bytes + data.draw(st.integers(0, 60)))
    score = Score(problem)
    found = _positions(program, parse(strategy).schedule(problem))
    for policy in ("backward_post", "backward_pre"):
        simple = _positions(program, parse(policy).schedule(problem))
        if score.fits(score.peak_bytes(simple)):
            assert score.of(found) <= score.of(simple) * (1 + CLOSE)


def _positions(program: Program, schedule: Schedule) -> list[int]:
    return [program.index[name] for name in schedule.order]


@every_strategy
@given(data=st.data())
@settings(max_examples=15)
def test_more_budget_never_makes_a_longer_step(strategy: Strategy, data) -> None:
    program = large(data.draw(fsdp_programs()))
    extra = sorted(data.draw(st.lists(st.integers(0, 40), min_size=2, max_size=3)))
    steps_us = [
        make_plan(
            program, H100, strategy, Absolute(max(smallest(program) + more * SCALE, 1)), launches=PRICED
        ).after.step_us
        for more in extra
    ]
    steps_us.append(make_plan(program, H100, strategy, Unlimited(), launches=PRICED).after.step_us)
    assert steps_us == sorted(steps_us, reverse=True)


@pytest.mark.parametrize("strategy", SPECS)
@pytest.mark.parametrize("launches", [Launches(), PRICED], ids=["agreed", "priced"])
def test_a_plan_moves_gathers_and_hardly_anything_else(strategy: str, launches: Launches) -> None:
    """B48: of S17's layers, a gather, a wait, a matmul and 24 pointwise ops each, all but the first two can stay where they are."""
    layers = 12 if strategy.startswith("exact") else 40
    program = _long(layers)
    order = make_plan(
        program, H100, parse(strategy), Unlimited(), launches=replace(launches, coalesce="off")
    ).schedule.order
    assert sorted(order) == sorted(program.order)
    assert len(order) - _longest_kept(program, order) <= len(order) / 10


def _long(layers: int) -> Program:
    build = Builder()
    value, shards = build.input("x", SCALE), [build.input(f"shard{n}", SCALE, held=True) for n in range(layers)]
    for layer, shard in enumerate(shards):
        weight = build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, 8 * SCALE, unit=f"blocks.{layer}"))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=SCALE, flops=10**10)
        for step in range(24):
            value = build.compute(f"relu{layer}_{step}", value, size_bytes=SCALE, category=Category.POINTWISE)
    return build.output(value)


def _longest_kept(program: Program, order: Sequence[str]) -> int:
    """The most ops that are in one order before and after: the longest ascending run of positions (patience sorting)."""
    ends: list[int] = []
    for name in order:
        position = program.index[name]
        at = bisect_left(ends, position)
        ends[at : at + 1] = [position]
    return len(ends)


def test_every_hash_seed_gives_the_same_orders() -> None:
    orders = {seed: _orders(SPECS, seed) for seed in ("0", "1", "2")}
    assert orders["0"] == orders["1"] == orders["2"]
    assert len(orders["0"]) == len(SPECS)


def _orders(specs: Sequence[str], seed: str) -> list[list[str]]:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *specs], capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    found: list[list[str]] = json.loads(done.stdout)
    return found


_SCRIPT = """
import json, sys
from overlap_pass.graph.dag import build_dag
from overlap_pass.registry import parse
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import CLOSE, Score
from overlap_pass.schedule.types import Problem
from tests.pure.programs import Builder, prices

build = Builder()
value = build.input("x", 8)
returned = []
for layer in range(6):
    group = f"g{layer % 2}"
    shard = build.cast(f"cast{layer}", build.input(f"shard{layer}", 8, held=True), 4)
    value = build.compute(f"mm{layer}", value, build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, 9, group=group)), size_bytes=5)
    returned.append(build.wait(f"rw{layer}", build.reduce_scatter(f"rs{layer}", build.compute(f"dw{layer}", value, size_bytes=7), 2, group=group)))
program = build.output(value, *returned)
costs = prices(program, {op.name: 3.0 + position % 7 for position, op in enumerate(program.ops) if op.name[:2] in ("mm", "ag", "rs", "dw")})
dag = build_dag(program)
budget_bytes = Room.of(Placement(dag)).smallest_bytes + 20
print(json.dumps([parse(text).schedule(Problem(dag, costs, budget_bytes)).order for text in sys.argv[1:]]))
"""
