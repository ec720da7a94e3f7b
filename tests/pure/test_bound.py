"""The lower bound: never above what any legal order reaches, and tight where theory says so."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Category, CollectiveKind, OpKind, Phase, Program, Role
from overlap_pass.schedule.placement import Placement
from overlap_pass.simulate.bound import fixed_compute, lower_bound
from overlap_pass.simulate.engine import simulate
from overlap_pass.simulate.windows import jackson_us
from tests.pure.programs import Builder, fsdp_programs, legal_orders, priced, prices, random_order

_ENOUGH = 1500
_SLACK = 1e-6  # floating point, in µs


# It holds


@settings(max_examples=150, deadline=None)
@given(priced(fsdp_programs(max_layers=2)), st.booleans())
def test_no_order_of_an_exhaustive_enumeration_is_faster_than_the_bound(
    case: tuple[Program, CostTable], compute_is_free: bool
) -> None:
    program, costs = case
    dag = build_dag(program)
    fixed = () if compute_is_free else fixed_compute(program)
    orders = list(itertools.islice(legal_orders(dag, fixed), _ENOUGH + 1))
    assume(len(orders) <= _ENOUGH)
    best_us = min(simulate(program, costs, order).step_us for order in orders)
    assert lower_bound(dag, costs, fixed=fixed).step_us <= best_us + _SLACK


@settings(max_examples=200, deadline=None)
@given(
    priced(fsdp_programs(max_layers=6)),
    st.randoms(use_true_random=False),
    st.booleans(),
    st.sampled_from((0.0, 3.0, 30.0)),
)
def test_no_random_legal_order_is_faster_than_the_bound(
    case: tuple[Program, CostTable], draws: random.Random, compute_is_free: bool, cpu_ahead_us: float
) -> None:
    program, costs = case[0], replace(case[1], cpu_ahead_us=cpu_ahead_us)
    dag = build_dag(program)
    fixed = () if compute_is_free else fixed_compute(program)
    step_us = simulate(program, costs, random_order(dag, draws, fixed)).step_us
    assert lower_bound(dag, costs, fixed=fixed).step_us <= step_us + _SLACK


@settings(max_examples=100, deadline=None)
@given(priced(fsdp_programs(max_layers=4)))
def test_a_bound_for_more_orders_is_never_higher(case: tuple[Program, CostTable]) -> None:
    program, costs = case
    dag = build_dag(program)
    compute = tuple(op.name for op in program.ops if op.kind is OpKind.COMPUTE)
    all_fixed, default, none = (lower_bound(dag, costs, fixed=f).step_us for f in (compute, None, ()))
    assert none <= default + _SLACK
    assert default <= all_fixed + _SLACK


@settings(max_examples=200, deadline=None)
@given(fsdp_programs(max_layers=5))
def test_what_the_strategies_may_move_is_never_taken_as_fixed(program: Program) -> None:
    placement = Placement(build_dag(program))
    assert not {program.ops[position].name for position in placement.free} & set(fixed_compute(program))


# It is tight


def _chain(layers: int, phase: Phase = Phase.FORWARD) -> Builder:
    """layers times: gather, wait, matmul; the matmuls in a chain."""
    build = Builder(phase=phase)
    hidden = build.input("x")
    shards = [build.input(f"shard{n}", held=True) for n in range(layers)]
    for n, shard in enumerate(shards):
        weight = build.wait(f"w{n}", build.all_gather(f"g{n}", shard))
        hidden = build.compute(f"mm{n}", hidden, weight)
    return build


def _best(program: Program, costs: CostTable) -> float:
    dag = build_dag(program)
    return min(simulate(program, costs, order).step_us for order in legal_orders(dag, fixed_compute(program)))


def test_a_compute_bound_forward_is_bounded_by_its_head_and_all_compute() -> None:
    """Nothing hides the first gather; everything else can be hidden: 5 + 3 x 10, one chain here."""
    program = _chain(3).output("mm2")
    costs = prices(program, {f"g{n}": 5.0 for n in range(3)} | {f"mm{n}": 10.0 for n in range(3)})
    bound = lower_bound(build_dag(program), costs)
    assert (bound.step_us, bound.by) == (35, "chain")
    assert _best(program, costs) == 35


def test_a_communication_bound_forward_is_bounded_by_all_gathers_and_the_last_matmul() -> None:
    program = _chain(3).output("mm2")
    costs = prices(program, {f"g{n}": 10.0 for n in range(3)} | {f"mm{n}": 4.0 for n in range(3)})
    assert lower_bound(build_dag(program), costs).step_us == 34
    assert _best(program, costs) == 34


def test_the_last_reduction_of_a_backward_stands_behind_all_compute() -> None:
    """5 for the first gather, 2 x 10 + 2 x 10 of compute, 7 for the last reduction."""
    build = _chain(2, Phase.BACKWARD)
    reduced = []
    for n in (1, 0):
        gradient = build.compute(f"d{n}", "mm1")
        reduced.append(build.wait(f"rw{n}", build.reduce_scatter(f"r{n}", gradient)))
    program = build.output(*reduced)
    times = {"g0": 5.0, "g1": 5.0, "r0": 7.0, "r1": 7.0} | dict.fromkeys(("mm0", "mm1", "d0", "d1"), 10.0)
    costs = prices(program, times)
    bound = lower_bound(build_dag(program), costs)
    assert (bound.step_us, bound.by) == (52, "head and tail")
    assert simulate(program, costs, _hoisted(program)).step_us == 52


def test_casts_of_earlier_gradients_do_not_hide_the_last_reduction() -> None:
    """Three gradients of 10, each cast (2) and reduced (7): casts put off beside the last reduction put theirs off too."""
    build = Builder(phase=Phase.BACKWARD)
    hidden, reduced = build.input("x"), []
    for n in range(3):
        hidden = build.compute(f"d{n}", hidden)
        reduced.append(build.wait(f"rw{n}", build.reduce_scatter(f"r{n}", build.cast(f"upcast{n}", hidden))))
    program = build.output(*reduced)
    costs = prices(program, {f"d{n}": 10.0 for n in range(3)} | {f"upcast{n}": 2.0 for n in range(3)}
                   | {f"r{n}": 7.0 for n in range(3)})  # fmt: skip
    assert lower_bound(build_dag(program), costs).step_us == 30 + 6 + 7
    draws = random.Random(0)
    orders = [random_order(build_dag(program), draws, fixed_compute(program)) for _ in range(2000)]
    assert min(simulate(program, costs, order).step_us for order in orders) == 43


def _hoisted(program: Program) -> tuple[str, ...]:
    """Gathers first, waits of reductions last."""
    first = [op.name for op in program.ops if op.kind is OpKind.INPUT]
    gathers = [op.name for op in program.launches if op.name.startswith("g")]
    last = [op.name for op in program.ops if op.kind is OpKind.WAIT and op.name.startswith("r")]
    middle = [name for name in program.order[:-1] if name not in (*first, *gathers, *last)]
    return (*first, *gathers, *middle, *last, "output")


def _side_by_side(compute_us: float, gather_us: float, contention: Contention) -> tuple[float, float, str]:
    """Bound and best step of one matmul and one gather that do not need each other."""
    build = Builder()
    x, shard = build.input("x"), build.input("shard")
    gather = build.all_gather("gather", shard)
    first = build.compute("first", x)
    program = build.output(first, build.wait("weight", gather))
    costs = prices(program, {"first": compute_us, "gather": gather_us}, contention=contention)
    bound = lower_bound(build_dag(program), costs)
    return bound.step_us, _best(program, costs), bound.by


@pytest.mark.parametrize("times", [(10.0, 10.0), (10.0, 3.0), (3.0, 10.0), (0.0, 5.0), (5.0, 0.0)])
@pytest.mark.parametrize(
    "contention", [Contention(), Contention(1.25, 1.5), Contention(1.0, 2.0), Contention(1.6, 1.0)]
)
def test_one_op_beside_one_collective_is_bounded_exactly_whatever_the_contention(
    times: tuple[float, float], contention: Contention
) -> None:
    bound_us, best_us, _ = _side_by_side(*times, contention)
    assert bound_us == pytest.approx(best_us)


def test_the_correction_for_contention_is_the_one_of_the_proof() -> None:
    """C = K = 10, c = 1.25, k = 1.5: at most 12.5 µs side by side, which gain 1/1.25 + 1/1.5 - 1 of themselves."""
    bound_us, _, by = _side_by_side(10, 10, Contention(1.25, 1.5))
    assert bound_us == pytest.approx(20 - (1 / 1.25 + 1 / 1.5 - 1) * 12.5)
    assert by == "compute lane"


def test_where_running_side_by_side_loses_the_bound_is_one_after_the_other() -> None:
    bound_us, best_us, _ = _side_by_side(10, 10, Contention(3.0, 3.0))
    assert bound_us == best_us == 20


def test_a_cpu_bound_step_is_bounded_by_the_cpu_and_the_last_op() -> None:
    program, names = Builder().chain(4)
    costs = prices(program, dict.fromkeys(names, 1.0), launch_us=dict.fromkeys(names, 10.0))
    bound = lower_bound(build_dag(program), costs)
    assert (bound.values["CPU lane"], bound.step_us) == (40, 41)


def test_the_lanes_have_their_names_and_the_largest_value_wins() -> None:
    build = Builder()
    waits = []
    for n, group in enumerate(("g0", "g0", "g1")):
        waits.append(build.wait(f"w{n}", build.all_gather(f"gather{n}", build.input(f"s{n}"), group=group)))
    program = build.output(build.compute("mm", *waits))
    times = {"gather0": 4.0, "gather1": 5.0, "gather2": 6.0, "mm": 1.0}
    shared = lower_bound(build_dag(program), prices(program, times, contention=Contention(1.0, 1.0, 2.0)))
    assert shared.values["communicator g0"] == 9
    assert shared.values["communicator g1"] == 6
    assert shared.values["wire"] == 15  # one wire, equal shares: no faster than one after the other
    assert (shared.step_us, shared.by) == (16, "head and tail")
    assert lower_bound(build_dag(program), prices(program, times)).step_us == 10  # 9 on g0, then mm


def test_a_wire_that_carries_more_when_shared_bounds_by_what_it_carries_then() -> None:
    """Factor 1.5 for two: each at 2/3, so 4/3 together: 8 + 8 take 12."""
    build = Builder()
    gathers = [build.all_gather(f"gather{n}", build.input(f"s{n}"), group=f"g{n}") for n in range(2)]
    program = build.output(*(build.wait(f"w{n}", gather) for n, gather in enumerate(gathers)))
    costs = prices(program, dict.fromkeys(gathers, 8.0), contention=Contention(1.0, 1.0, 1.5))
    bound = lower_bound(build_dag(program), costs)
    assert bound.step_us == pytest.approx(12)
    assert simulate(program, costs).step_us == pytest.approx(12)


def test_an_order_edge_out_of_a_launch_does_not_stand_for_its_end() -> None:
    """Two activation all-reduces on two groups keep their order of launch; the second need not await the first."""
    build = Builder()
    names = []
    for n in range(2):
        launch = build.launch(
            f"sum{n}", build.input(f"x{n}"), CollectiveKind.ALL_REDUCE, Role.ACTIVATION, group=f"g{n}"
        )
        names.append(launch)
    program = build.output(*(build.wait(f"w{n}", name) for n, name in enumerate(names)))
    costs = prices(program, {"sum0": 10.0, "sum1": 10.0})
    assert lower_bound(build_dag(program), costs).step_us == simulate(program, costs).step_us == 10


# Its parts


def test_fixed_is_all_compute_but_what_travels_with_a_collective() -> None:
    """shard ─ cast ─ gather ─ copy_out ─ mm ─ grad ─ upcast ─ reduce ─ downcast; mask reads inputs only and stays."""
    build = Builder()
    x = build.input("x")
    gather = build.all_gather("gather", build.cast("cast", build.input("shard")))
    copied = build.compute("copy_out", build.wait("weight", gather), category=Category.COPY)
    mask = build.compute("mask", x, category=Category.POINTWISE)
    product = build.compute("mm", mask, copied)
    gradient = build.compute("grad", product)
    reduction = build.reduce_scatter("reduce", build.cast("upcast", gradient))
    program = build.output(product, build.cast("downcast", build.wait("reduced", reduction)))
    assert fixed_compute(program) == ("mask", "mm", "grad")


def test_activation_collectives_take_nothing_with_them() -> None:
    build = Builder()
    cast = build.cast("cast", build.compute("mm", build.input("x")))
    total = build.wait("total", build.launch("sum", cast, CollectiveKind.ALL_REDUCE, Role.ACTIVATION))
    program = build.output(build.compute("next", build.cast("back", total)))
    assert fixed_compute(program) == ("mm", "cast", "back", "next")


def test_the_bound_of_an_empty_program_is_nothing() -> None:
    program = Program("empty", Phase.FORWARD, (), ())
    bound = lower_bound(build_dag(program), prices(program, {}))
    assert bound.step_us == 0
    assert bound.gap_percent(0.0) == 0


def test_the_gap_is_in_percent_of_the_bound() -> None:
    program = _chain(1).output("mm0")
    bound = lower_bound(build_dag(program), prices(program, {"g0": 30.0, "mm0": 70.0}))
    assert bound.gap_percent(110.0) == pytest.approx(10)


_JOBS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=7)


@settings(max_examples=300, deadline=None)
@given(_JOBS)
def test_jacksons_preemptive_schedule_is_the_best_bound_over_all_sets(jobs: list[tuple[int, int, int]]) -> None:
    best = 0.0
    for size in range(1, len(jobs) + 1):
        for chosen in itertools.combinations(jobs, size):
            releases, durations, tails = zip(*chosen, strict=True)
            best = max(best, min(releases) + sum(durations) + min(tails))
    assert jackson_us((float(r), float(p), float(q)) for r, p, q in jobs) == best
