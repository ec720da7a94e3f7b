"""``greedy``: as early as memory allows, no earlier, and blind to prices."""

from __future__ import annotations

from overlap_pass.graph.dag import build_dag
from overlap_pass.memory.ledger import peak
from overlap_pass.schedule.placement import Placement
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.strategies import Greedy
from overlap_pass.schedule.types import Problem
from tests.pure.programs import Builder, prices


def chain(layers: int = 4):
    build = Builder()
    value = build.input("x", 10, held=True)
    for layer in range(layers):
        shard = build.input(f"shard{layer}", 50, held=True)
        weight = build.wait(f"w{layer}", build.all_gather(f"ag{layer}", shard, 100))
        value = build.compute(f"mm{layer}", value, weight, size_bytes=10)
    return build.output(value)


def order_of(program, budget_bytes, times=None):
    return Greedy().schedule(Problem(build_dag(program), prices(program, times or {}), budget_bytes)).order


def test_without_a_budget_every_gather_is_launched_before_the_first_computation() -> None:
    order = order_of(chain(), None)
    assert all(order.index(f"ag{layer}") < order.index("mm0") for layer in range(4))


def test_with_room_for_one_more_weight_each_gather_is_one_computation_ahead() -> None:
    program = chain()
    smallest_bytes = Room.of(Placement(build_dag(program))).smallest_bytes
    order = order_of(program, smallest_bytes + 100)
    assert peak(program, order).peak_bytes <= smallest_bytes + 100
    for layer in (2, 3):
        assert order.index(f"mm{layer - 2}") < order.index(f"ag{layer}") < order.index(f"mm{layer - 1}")


def test_with_no_room_every_gather_is_where_it_is_used() -> None:
    program = chain()
    smallest_bytes = Room.of(Placement(build_dag(program))).smallest_bytes
    order = order_of(program, smallest_bytes + 80)
    for layer in (1, 2, 3):
        assert order.index(f"mm{layer - 1}") < order.index(f"ag{layer}") < order.index(f"mm{layer}")


def test_prices_change_nothing() -> None:
    program = chain()
    slow = {op.name: 100.0 for op in program.launches}
    assert order_of(program, 400, slow) == order_of(program, 400, {"mm1": 50.0})


def test_a_reduction_is_waited_for_as_late_as_its_input_has_room() -> None:
    build = Builder()
    x = build.input("x", 10, held=True)
    gradient = build.compute("dw", x, size_bytes=100)
    reduced = build.wait("rw", build.reduce_scatter("rs", gradient, 5))
    value = build.compute("b", build.compute("a", x, size_bytes=10), size_bytes=10)
    program = build.output(value, reduced)
    order = order_of(program, None)
    assert order.index("dw") < order.index("rs") < order.index("a")
    assert order.index("rw") > order.index("b")
    room = Room.of(Placement(build_dag(program)))
    order = order_of(program, room.smallest_bytes)
    assert peak(program, order).peak_bytes == room.smallest_bytes
