"""The same step on another number of ranks: what grows, what shrinks, what stays, what cannot be asked."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.errors import OptionError
from overlap_pass.graph.program import CollectiveKind, Program, Role
from overlap_pass.memory.ledger import peak
from overlap_pass.simulate.engine import simulate
from overlap_pass.simulate.rescale import rescale
from tests.pure.programs import Builder, fsdp_programs


def _step() -> Program:
    """A gather and a matmul, a gradient reduced over the shards (g0) and then over the replicas (g1), two ranks each."""
    build = Builder()
    x, shard = build.input("x", 1000), build.input("shard", 800, held=True)
    weight = build.wait("weight", build.all_gather("gather", build.cast("cast", shard, 400), 800))
    hidden = build.compute("mm", x, weight, size_bytes=1000)
    gradient = build.compute("grad", hidden, size_bytes=800)
    reduced = build.wait("reduced", build.reduce_scatter("reduce", build.cast("upcast", gradient, 1600), 800))
    average = build.launch("average", reduced, CollectiveKind.ALL_REDUCE, Role.GRADIENT, size_bytes=800, group="g1")
    averaged = build.wait("averaged", average)
    return build.output(hidden, build.cast("downcast", averaged, 400), shard)


def _sizes(program: Program) -> dict[str, int]:
    return {storage.owner: storage.size_bytes for storage in program.storages}


def test_shards_shrink_and_full_tensors_stay() -> None:
    before, after = _sizes(_step()), _sizes(rescale(_step(), {"g0": 16}))
    assert {name: before[name] for name in before if after[name] != before[name]} == {
        "shard": 800, "cast": 400, "reduce": 800, "average": 800, "downcast": 400,
    }  # fmt: skip
    assert [after[name] for name in ("shard", "cast", "reduce", "average", "downcast")] == [100, 50, 100, 100, 50]


def test_payloads_of_gathers_and_reductions_stay_and_that_of_the_replicas_follows_the_shards() -> None:
    program = rescale(_step(), {"g0": 16})
    payloads = {
        op.name: (op.collective.payload_bytes, op.collective.group_size) for op in program.launches if op.collective
    }
    assert payloads == {"gather": (800, 16), "reduce": (1600, 16), "average": (100, 2)}
    assert program.groups == {"g0": 16, "g1": 2}


def test_traffic_follows_the_sizes() -> None:
    program = rescale(_step(), {"g0": 16})
    assert (program.op("cast").read_bytes, program.op("cast").written_bytes) == (100, 50)
    assert (program.op("mm").read_bytes, program.op("mm").written_bytes) == (1800, 1000)


def test_more_replicas_change_no_size() -> None:
    assert _sizes(rescale(_step(), {"g1": 8})) == _sizes(_step())


def test_a_rescaled_program_can_be_priced_simulated_and_counted() -> None:
    """From one node of 8 to two: the ring is longer, the shards are smaller."""
    one, two = rescale(_step(), {"g0": 8}), rescale(_step(), {"g0": 16})
    h100 = load_hardware("h100")
    assert simulate(two, price(two, h100)).communication_us > simulate(one, price(one, h100)).communication_us
    assert peak(two).base_bytes < peak(one).base_bytes


def test_an_unknown_group_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"group 'g7' is not in program 'program'; its groups: g0, g1"):
        rescale(_step(), {"g7": 4})


@pytest.mark.parametrize("size", [0, -2])
def test_a_group_of_no_rank_is_refused(size: int) -> None:
    with pytest.raises(OptionError, match=f"cannot have {size} ranks"):
        rescale(_step(), {"g0": size})


def test_a_group_with_activation_traffic_is_refused_by_the_collective() -> None:
    build = Builder()
    total = build.launch("sum", build.input("x", 8), CollectiveKind.ALL_REDUCE, Role.ACTIVATION, size_bytes=8)
    program = build.output(build.wait("total", total))
    with pytest.raises(OptionError, match="activation collective 'sum'"):
        rescale(program, {"g0": 4})


@settings(max_examples=50, deadline=None)
@given(fsdp_programs())
def test_the_same_sizes_give_the_same_program(program: Program) -> None:
    assert rescale(program, {}) == program
