"""Which gathers of a forward are launched by the step before, and what that is predicted to save."""

from __future__ import annotations

import pytest

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.graph.program import Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.ahead import Ahead, launched_ahead
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder

MiB = 2**20
H100 = load_hardware("h100")


def forward(*sizes_mib: int, gathered: bool = True) -> Program:
    """Layers whose weights are gathered just before they are used, all of one unit; or are there from the start."""
    build = Builder()
    value = build.input("x", MiB)
    for number, size_mib in enumerate(sizes_mib):
        weight = build.input(f"weight{number}", size_mib * MiB // (2 if gathered else 1), held=True)
        if gathered:
            cast = build.cast(f"cast{number}", weight, size_mib * MiB // 2)
            gather = build.all_gather(f"gather{number}", cast, size_mib * MiB, unit="block")
            weight = build.wait(f"wait{number}", gather)
        value = build.compute(f"y{number}", value, weight, size_bytes=MiB, flops=10**12)
    return build.output(value)


def chosen(program: Program, possible: int, budget_bytes: int | None = None) -> Ahead | None:
    names = [op.name for op in program.launches][:possible]
    return launched_ahead(program, H100, program.order, names, budget_bytes)


def test_as_many_as_one_unit_holds_are_ahead() -> None:
    found = chosen(forward(200, 200, 200), 3)
    assert found is not None
    assert found.launches == ("gather0", "gather1", "gather2"), "the unit has 600 MiB"
    assert found.held_bytes == 600 * MiB


def test_small_units_may_hold_256_mib_beside_each_other() -> None:
    build = Builder()
    value = build.input("x", MiB)
    for number in range(4):
        shard = build.input(f"weight{number}", 50 * MiB, held=True)
        weight = build.wait(
            f"wait{number}", build.all_gather(f"gather{number}", shard, 100 * MiB, unit=f"unit{number}")
        )
        value = build.compute(f"y{number}", value, weight, size_bytes=MiB)
    found = chosen(build.output(value), 4)
    assert found is not None
    assert found.launches == ("gather0", "gather1")


def test_no_more_are_ahead_than_could_be() -> None:
    program = forward(100, 100)
    assert chosen(program, 0) is None
    found = chosen(program, 1)
    assert found is not None
    assert found.launches == ("gather0",)


def test_the_budget_counts_what_is_ahead_from_the_first_op_on() -> None:
    """As written each layer's weight is alive alone; two ahead are alive together, beside the first layer's result."""
    program = forward(100, 100)
    one, both = (chosen(program, 2, budget_bytes=peak(program).peak_bytes + extra * MiB) for extra in (0, 200))
    assert one is not None
    assert both is not None
    assert one.launches == ("gather0",), "it is gathered before anything else anyway"
    assert both.launches == ("gather0", "gather1")


def test_what_is_saved_is_the_step_without_the_gathers() -> None:
    program, there = forward(100, 100), forward(100, 100, gathered=False)
    found = chosen(program, 2)
    assert found is not None
    written_us = simulate(program, price(program, H100)).step_us
    assert found.saved_us == pytest.approx(written_us - simulate(there, price(there, H100)).step_us, rel=1e-3)
    assert found.saved_us > 0


def test_the_record_names_what_is_gathered_and_what_it_is_worth() -> None:
    names = ("a.weight", "b.weight", "c.weight", "d.weight")
    text = Ahead(("g", "h"), names, 3 * MiB, 400.0, 250.0).summary()
    assert text == (
        "gathered across the step's edge: a.weight, b.weight, c.weight and 1 more (3.00 MiB held through the optimizer): saves "
        "250.0 µs a step where what is updated behind them takes 400.0 µs or more (predicted)"
    )
