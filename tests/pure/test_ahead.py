"""Which gathers of a forward are launched by the step before, and what that is predicted to save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.graph.program import Category, CollectiveKind, Program
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.ahead import Ahead, Room, launched_ahead
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import Builder

MiB = 2**20
UNLIMITED = Room(None, None)
H100 = load_hardware("h100")
H100 = replace(H100, compute=replace(H100.compute, collective_launch_us=0.0))  # the host is ahead of all steps here


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


def chosen(program: Program, possible: int, room: Room = UNLIMITED) -> Ahead | None:
    names = [op.name for op in program.launches][:possible]
    return launched_ahead(program, H100, program.order, names, room)


def launched(program: Program, possible: int, room: Room = UNLIMITED) -> tuple[str, ...]:
    found = chosen(program, possible, room)
    return () if found is None else found.launches


def test_as_many_are_ahead_as_gain_anything_and_no_more_than_could_be() -> None:
    program = forward(200, 200, 200)
    assert launched(program, 0) == ()
    assert launched(program, 1) == ("gather0",)
    assert launched(program, 3) == ("gather0",), "the others are hidden"


def test_an_embedding_hides_nothing_of_what_is_read_behind_it() -> None:
    build = Builder()
    value = build.input("x", MiB)
    for number, category in enumerate((Category.INDEX, *[Category.MATMUL] * 6)):
        shard = build.input(f"weight{number}", 50 * MiB, held=True)
        weight = build.wait(f"wait{number}", build.all_gather(f"gather{number}", shard, 100 * MiB, unit=f"u{number}"))
        value = build.compute(f"y{number}", value, weight, size_bytes=MiB, category=category, flops=10**11)
    assert launched(build.output(value), 7) == ("gather0", "gather1")


def test_what_is_held_and_sent_stays_within_what_the_budget_adds() -> None:
    program = forward(100, 100)
    peak_bytes = peak(program).peak_bytes + 1000 * MiB
    assert launched(program, 2, Room(peak_bytes, 149 * MiB)) == (), "half of a parameter is sent by each of two ranks"
    assert launched(program, 2, Room(peak_bytes, 150 * MiB)) == ("gather0",)


def test_a_budget_in_bytes_leaves_room_for_shards_and_all_gradients_besides() -> None:
    """Two shards of 50 MiB, gradients of the same size, and then what is ahead."""
    program = forward(100, 100)
    assert peak(program).peak_bytes < 349 * MiB
    assert launched(program, 2, Room(349 * MiB, None)) == ()
    assert launched(program, 2, Room(350 * MiB, None)) == ("gather0",)


def test_in_the_forward_they_count_from_before_its_first_op() -> None:
    """What is computed before the first weight is read is alive beside it then."""
    build = Builder()
    large = build.compute("large", build.input("x", MiB), size_bytes=500 * MiB)
    small = build.compute("small", large, size_bytes=MiB)
    shard = build.input("weight", 50 * MiB, held=True)
    weight = build.wait("wait", build.all_gather("gather", shard, 100 * MiB, unit="block"))
    program = build.output(build.compute("y", small, weight, size_bytes=MiB))
    peak_bytes = peak(program).peak_bytes
    assert launched(program, 1, Room(peak_bytes + 99 * MiB, 1000 * MiB)) == ()
    assert launched(program, 1, Room(peak_bytes + 100 * MiB, 1000 * MiB)) == ("gather",)


def test_what_is_saved_is_the_step_without_the_gather_less_what_it_costs_the_optimizer() -> None:
    """The cast is made either way."""
    program, there = forward(100), forward(100, gathered=False)
    found = chosen(program, 1)
    assert found is not None
    costs = price(program, H100)
    contention = H100.contention_by_kind.get(CollectiveKind.ALL_GATHER, H100.contention)
    costs_us = found.takes_us * (1 - 1 / contention.compute_beside_communication)
    without_us = simulate(there, price(there, H100)).step_us + costs.duration_us["cast0"]
    assert found.saved_us + costs_us == pytest.approx(simulate(program, costs).step_us - without_us, rel=1e-3)
    assert found.saved_us > 0


def test_the_record_names_what_is_gathered_and_what_it_is_worth() -> None:
    names = ("a.weight", "b.weight", "c.weight", "d.weight")
    text = Ahead(("g", "h"), names, 3 * MiB, 400.0, 250.0).summary()
    assert text == (
        "gathered across the step's edge: a.weight, b.weight, c.weight and 1 more (3.00 MiB held through the optimizer): saves "
        "250.0 µs a step where what is updated behind them takes 400.0 µs or more (predicted)"
    )
