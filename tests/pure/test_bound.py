"""The lower bound: never above what any legal order reaches, and tight where theory says so."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import OpKind, Program
from overlap_pass.schedule.placement import Placement
from overlap_pass.simulate.bound import fixed_compute, lower_bound
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder, fsdp_programs, legal_orders, priced, prices, random_order

_ENOUGH = 1500
_SLACK = 1e-6  # floating point, in µs


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


@settings(max_examples=300, deadline=None)
@given(priced(fsdp_programs(max_layers=6)), st.randoms(use_true_random=False), st.booleans())
def test_no_random_legal_order_is_faster_than_the_bound(
    case: tuple[Program, CostTable], draws: random.Random, compute_is_free: bool
) -> None:
    program, costs = case
    dag = build_dag(program)
    fixed = () if compute_is_free else fixed_compute(program)
    step_us = simulate(program, costs, random_order(dag, draws, fixed)).step_us
    assert lower_bound(dag, costs, fixed=fixed).step_us <= step_us + _SLACK
