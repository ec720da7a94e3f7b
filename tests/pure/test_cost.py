"""Prices: rooflines, fused clusters, collectives by α–β, and the table made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlap_pass.cost.collectives import collective_us, link_of
from overlap_pass.cost.compute import clusters, kernel_us
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import price
from overlap_pass.errors import OptionError
from overlap_pass.graph.program import Category, Collective, CollectiveKind, OpKind, OpNode, Program, Role
from tests.pure.programs import Builder, fsdp_programs

H200 = load_hardware("h200")
MB, MIB = 10**6, 2**20


def _gather(payload_bytes: int, ranks: int = 2, kind: CollectiveKind = CollectiveKind.ALL_GATHER) -> Collective:
    return Collective(kind, "g0", ranks, payload_bytes, "bfloat16", Role.PARAMETER)


def _matmul(flops: int, moved_bytes: int = 0, dtype: str = "bfloat16") -> OpNode:
    return OpNode(
        "mm", OpKind.COMPUTE, "mm", category=Category.MATMUL, dtype=dtype, flops=flops, read_bytes=moved_bytes
    )


# Compute


def test_a_measured_gemm_is_priced_within_ten_percent() -> None:
    """4096 x 4096 x 14336 in bf16, over and over, took 0.70 ms each on an H200."""
    rows, inner, columns = 4096, 4096, 14336
    traffic_bytes = 2 * (rows * inner + inner * columns + rows * columns)
    assert kernel_us(_matmul(2 * rows * inner * columns, traffic_bytes), H200) == pytest.approx(700, rel=0.1)


def test_a_matmul_of_much_traffic_and_little_work_is_bound_by_memory() -> None:
    """One row against a weight: every weight is read once for one multiply-add."""
    op = _matmul(2 * 4096 * 14336, 2 * 4096 * 14336)
    assert kernel_us(op, H200) == pytest.approx(5.0 + H200.traffic_us(2 * 4096 * 14336))


def test_efficiency_halves_where_the_work_takes_as_long_as_the_ramp() -> None:
    peak = H200.peak_flops_per_us("bfloat16") * H200.compute.matmul_efficiency
    flops = int(peak * H200.compute.matmul_ramp_us)
    assert flops / kernel_us(_matmul(flops), H200) == pytest.approx(peak / 2, rel=1e-6)


def test_float32_matmuls_run_at_the_float32_peak() -> None:
    fast, slow = kernel_us(_matmul(10**13), H200), kernel_us(_matmul(10**13, dtype="float32"), H200)
    assert slow / fast == pytest.approx(989.4 / 67.0, rel=0.01)


def test_attention_has_its_own_efficiency() -> None:
    op = replace(_matmul(10**12), category=Category.ATTENTION)
    assert kernel_us(op, H200) - 5.0 == pytest.approx(1e12 / (989.4e6 * H200.compute.attention_efficiency))


# Fused clusters


def _norm() -> Program:
    """x ─ square ─ mean ─ scale(x) ─ mm, all of 1000 bytes but for the mean."""
    build = Builder()
    x = build.input("x", 1000)
    square = build.compute("square", x, size_bytes=1000, category=Category.POINTWISE)
    mean = build.compute("mean", square, size_bytes=10, category=Category.REDUCTION)
    scale = build.compute("scale", x, mean, size_bytes=1000, category=Category.POINTWISE)
    return build.output(build.compute("mm", scale, size_bytes=1000))


def test_a_chain_of_pointwise_ops_and_reductions_is_one_cluster_that_reads_and_writes_once() -> None:
    cluster, *others = clusters(_norm())
    assert not others
    assert cluster.members == ("square", "mean", "scale")
    assert sum(cluster.traffic_bytes) == pytest.approx(1000 + 1000)  # x once, scale's result once


def test_a_cluster_is_launched_once_and_its_members_share_its_time() -> None:
    costs = price(_norm(), H200)
    assert [costs.launch_us[name] for name in ("square", "mean", "scale")] == [H200.compute.kernel_launch_us, 0, 0]
    total_us = sum(costs.duration_us[name] for name in ("square", "mean", "scale"))
    assert total_us == pytest.approx(H200.compute.kernel_us + H200.traffic_us(2000))


def test_views_do_not_part_a_cluster() -> None:
    build = Builder()
    first = build.compute("first", build.input("x", 100), size_bytes=100, category=Category.POINTWISE)
    program = build.output(
        build.compute("second", build.view("view", first), size_bytes=100, category=Category.POINTWISE)
    )
    (cluster,) = clusters(program)
    assert cluster.members == ("first", "second")
    assert sum(cluster.traffic_bytes) == 200


def test_a_result_that_is_read_outside_is_written_once_and_not_read_again_inside() -> None:
    build = Builder()
    first = build.compute("first", build.input("x", 100), size_bytes=40, category=Category.POINTWISE)
    second = build.compute("second", first, size_bytes=30, category=Category.POINTWISE)
    program = build.output(build.compute("mm", first, second))
    (cluster,) = clusters(program)
    assert cluster.traffic_bytes == (100 + 40, 30)


def test_ops_around_another_kernel_are_not_fused_across_it() -> None:
    """first ─ mm ─ second, and second also reads first: fusing the two would put mm both before and behind them."""
    build = Builder()
    first = build.compute("first", build.input("x", 100), size_bytes=100, category=Category.POINTWISE)
    product = build.compute("mm", first, size_bytes=100)
    program = build.output(build.compute("second", first, product, size_bytes=100, category=Category.POINTWISE))
    assert [cluster.members for cluster in clusters(program)] == [("first",), ("second",)]


def test_ops_on_both_sides_of_a_collective_are_not_fused() -> None:
    build = Builder()
    cast = build.cast("cast", build.input("shard", 100), 50)
    weight = build.wait("weight", build.all_gather("gather", cast, 400))
    program = build.output(build.cast("after", weight, 400))
    assert [cluster.members for cluster in clusters(program)] == [("cast",), ("after",)]


def test_two_readers_of_one_input_that_do_not_read_each_other_stay_two_kernels() -> None:
    build = Builder()
    x = build.input("x", 100)
    program = build.output(build.cast("one", x, 50), build.cast("other", x, 50))
    assert [cluster.members for cluster in clusters(program)] == [("one",), ("other",)]


def test_opaque_ops_and_those_that_pick_rows_are_kernels_of_their_own() -> None:
    build = Builder()
    opaque = build.compute("opaque", build.input("x", 8), size_bytes=8, category=Category.POINTWISE, opaque=True)
    program = build.output(build.compute("rows", opaque, size_bytes=8, category=Category.INDEX))
    assert clusters(program) == ()


def test_copies_fuse_with_what_they_copy() -> None:
    build = Builder()
    turned = build.compute("turned", build.input("x", 100), size_bytes=100, category=Category.POINTWISE)
    program = build.output(build.compute("copied", turned, size_bytes=100, category=Category.COPY))
    (cluster,) = clusters(program)
    assert cluster.members == ("turned", "copied")
    assert sum(cluster.traffic_bytes) == 100 + 100


def test_a_table_is_read_only_where_rows_are_picked() -> None:
    build = Builder()
    rows = build.compute("rows", build.input("table", 10**9), size_bytes=10**6, category=Category.INDEX)
    assert kernel_us(build.output(rows).op(rows), H200) == pytest.approx(2.0 + H200.traffic_us(3 * 10**6))


# What another kernel computes again


def _activation(*, wide: int = 400, **options: bool) -> Program:
    """A saved value is widened; one matmul reads the activation, its result is multiplied with the widened value.

    As in the backward of a SwiGLU: x [100] ─ widened [400] ─ narrow [100] ─ mm ─ scaled(mm, widened) [100].
    """
    build = Builder()
    widened = build.compute("widened", build.input("x", 100), size_bytes=wide, category=Category.POINTWISE, **options)
    narrow = build.cast("narrow", widened, 100)
    product = build.compute("mm", narrow, size_bytes=100)
    return build.output(build.compute("scaled", product, widened, size_bytes=100, category=Category.POINTWISE))


def test_a_pointwise_result_is_computed_again_behind_a_matmul_and_never_stored() -> None:
    first, second = clusters(_activation())
    assert (first.members, first.traffic_bytes) == (("widened", "narrow"), (0.0, 100 + 100))
    assert (second.members, second.traffic_bytes) == (("scaled",), (100 + 100 + 100,))  # the product, x, its result


def test_a_random_result_is_stored_since_it_cannot_be_drawn_again() -> None:
    first, second = clusters(_activation(random=True))
    assert first.traffic_bytes == (100 + 400, 100)
    assert second.traffic_bytes == (100 + 400 + 100,)


def test_a_reduction_is_stored_since_it_would_be_done_again_for_each_element() -> None:
    build = Builder()
    total = build.compute("total", build.input("x", 1000), size_bytes=10, category=Category.REDUCTION)
    product = build.compute("mm", total, size_bytes=100)
    program = build.output(build.compute("scaled", product, total, size_bytes=100, category=Category.POINTWISE))
    assert [cluster.traffic_bytes for cluster in clusters(program)] == [(1000 + 10,), (100 + 10 + 100,)]


def test_a_result_of_many_reads_is_stored_if_it_is_read_twice() -> None:
    """Five reads and two readers: Inductor keeps it."""
    build = Builder()
    inputs = [build.input(f"x{n}", 10) for n in range(5)]
    mixed = build.compute("mixed", *inputs, size_bytes=10, category=Category.POINTWISE)
    product = build.compute("mm", build.cast("narrow", mixed, 5), size_bytes=10)
    program = build.output(build.compute("scaled", product, mixed, size_bytes=10, category=Category.POINTWISE))
    first, second = clusters(program)
    assert sum(first.traffic_bytes) == 5 * 10 + 10 + 5
    assert sum(second.traffic_bytes) == 10 + 10 + 10


def test_what_all_readers_compute_for_themselves_is_no_kernel() -> None:
    """A constant in front of a matmul that only ops behind it read: no start, no launch, no time."""
    build = Builder()
    ones = build.compute("ones", build.input("unit", 0), size_bytes=1000, category=Category.POINTWISE)
    product = build.compute("mm", build.input("x", 100), size_bytes=100)
    scaled = build.compute("scaled", product, ones, size_bytes=100, category=Category.POINTWISE)
    program = build.output(scaled)
    first, _ = clusters(program)
    assert not first.runs
    costs = price(program, H200)
    assert (costs.duration_us["ones"], costs.launch_us["ones"]) == (0.0, 0.0)


def _quotient_is_acyclic(program: Program) -> bool:
    """Contract each cluster to one node and look for a cycle, by repeated removal of nodes without predecessors."""
    of = {name: cluster.members[0] for cluster in clusters(program) for name in cluster.members}
    node = {op.name: of.get(op.name, op.name) for op in program.ops}
    edges = {(node[source], node[op.name]) for op in program.ops for source in op.inputs} - {
        (n, n) for n in node.values()
    }
    nodes = set(node.values())
    while nodes:
        free = nodes - {target for source, target in edges if source in nodes}
        if not free:
            return False
        nodes -= free
    return True


@settings(max_examples=100, deadline=None)
@given(fsdp_programs())
def test_clusters_can_be_run_one_after_the_other(program: Program) -> None:
    assert _quotient_is_acyclic(program)


@settings(max_examples=100, deadline=None)
@given(fsdp_programs())
def test_every_fusible_op_is_in_one_cluster_and_all_clusters_move_no_more_than_unfused_ops_would(
    program: Program,
) -> None:
    """Of a chain without wide fan-in no more is read twice than was written and read between the two."""
    found = clusters(program)
    names = [name for cluster in found for name in cluster.members]
    fusible = [op.name for op in program.ops if op.kind is OpKind.COMPUTE and op.category.fusible]
    assert sorted(names) == sorted(fusible)
    alone = sum(program.op(name).read_bytes + program.op(name).written_bytes for name in names)
    assert sum(sum(cluster.traffic_bytes) for cluster in found) <= alone + 1e-9


# Collectives


_ALONE_US = 20.0
"""A collective timed on its own takes this much more than in a queue of them: its launch, and the ranks' skew."""


@pytest.mark.parametrize(
    ("payload_bytes", "measured_us"),
    [(1 * MIB, 45), (4 * MIB, 45), (16 * MIB, 61), (64 * MIB, 160), (1024 * MIB, 1990)],
)
def test_all_gathers_of_two_ranks_are_priced_as_measured_within_ten_percent(
    payload_bytes: int, measured_us: float
) -> None:
    assert collective_us(_gather(payload_bytes), H200) == pytest.approx(measured_us - _ALONE_US, rel=0.1)


def test_a_reduce_scatter_is_priced_as_measured_within_ten_percent() -> None:
    """1 GiB took 2.04 ms, 872 MB took 1.79 ms."""
    kind = CollectiveKind.REDUCE_SCATTER
    assert collective_us(_gather(2**30, kind=kind), H200) == pytest.approx(2040 - _ALONE_US, rel=0.1)
    assert collective_us(_gather(872 * MB, kind=kind), H200) == pytest.approx(1790 - _ALONE_US, rel=0.1)


def test_the_collectives_of_a_measured_step_add_up_within_ten_percent() -> None:
    """8 layers, d 4096, 8 of 32 key/value heads, ffn 14336, vocabulary 32768 in bf16, gathered twice, reduced once in
    fp32, one collective a parameter on two ranks: about 31 ms back to back."""
    matrices = [32 * MIB] * 2 + [8 * MIB] * 2 + [112 * MIB] * 3 + [8192] * 2
    parameters = matrices * 8 + [256 * MIB] * 2 + [8192]
    gathers_us = 2 * sum(collective_us(_gather(size), H200) for size in parameters)
    kind = CollectiveKind.REDUCE_SCATTER
    reductions_us = sum(collective_us(_gather(2 * size, kind=kind), H200) for size in parameters)
    assert gathers_us + reductions_us == pytest.approx(31_000, rel=0.1)


def test_time_grows_by_the_bytes_that_cross_the_link() -> None:
    """(n - 1)/n of the tensor for a gather, twice that for an all-reduce, all of it for a broadcast."""
    crossing = {CollectiveKind.ALL_GATHER: 7 / 8, CollectiveKind.REDUCE_SCATTER: 7 / 8, CollectiveKind.ALL_TO_ALL: 7 / 8,
                CollectiveKind.ALL_REDUCE: 14 / 8, CollectiveKind.BROADCAST: 1.0}  # fmt: skip
    for kind, share in crossing.items():
        one, two = (collective_us(_gather(size, 8, kind), H200) for size in (2**30, 2**31))
        assert two - one == pytest.approx(share * 2**30 / (H200.intra_node.bandwidth_gb_per_s * 1e3))


def test_more_ranks_cost_more_hops() -> None:
    small = 1000
    two, eight = collective_us(_gather(small, 2), H200), collective_us(_gather(small, 8), H200)
    assert eight - two == pytest.approx(6 * H200.intra_node.hop_us)


def test_a_group_of_one_rank_copies_and_never_costs_nothing() -> None:
    assert collective_us(_gather(MB, 1), H200) == pytest.approx(2.0 + H200.traffic_us(2 * MB))


def test_a_packed_group_over_nodes_shares_the_adapters_of_a_node() -> None:
    """16 ranks on 2 nodes: 8 x 45 GB/s of network are above the rate of NVLink, so the link inside limits."""
    one, two = (collective_us(_gather(size, 16), H200) for size in (2**30, 2**31))
    assert two - one == pytest.approx(15 / 16 * 2**30 / (H200.intra_node.bandwidth_gb_per_s * 1e3))


def test_a_group_that_strides_over_nodes_has_one_adapter_a_rank() -> None:
    one, two = (collective_us(_gather(size, 16), H200, 1) for size in (2**30, 2**31))
    assert two - one == pytest.approx(15 / 16 * 2**30 / 45e3)
    assert link_of(16, H200, 1) == link_of(16, H200) == "inter_node"
    assert link_of(8, H200) == link_of(8, H200, 8) == "intra_node"


def test_an_all_to_all_over_nodes_goes_through_each_ranks_own_adapter() -> None:
    one, two = (collective_us(_gather(size, 16, CollectiveKind.ALL_TO_ALL), H200) for size in (2**30, 2**31))
    assert two - one == pytest.approx(8 / 16 * 2**30 / 45e3)  # 8 of 16 shares leave the node


@pytest.mark.parametrize("kind", list(CollectiveKind))
def test_a_bigger_payload_or_group_never_costs_less(kind: CollectiveKind) -> None:
    for ranks in (2, 4, 8, 16, 64, 512):
        times = [collective_us(_gather(2**exponent, ranks, kind), H200) for exponent in range(8, 34)]
        assert times == sorted(times)
    for size in (2**10, 2**30):
        times = [collective_us(_gather(size, ranks, kind), H200) for ranks in (2, 4, 8)]
        assert times == sorted(times)


# The table


def _mixed() -> Program:
    build = Builder()
    shard = build.input("shard", 64, held=True)
    cast = build.cast("cast", shard, 32)
    weight = build.wait("weight", build.all_gather("gather", cast, 64))
    view = build.view("view", weight)
    strange = build.compute("strange", view, size_bytes=48, category=Category.OTHER, flops=None)
    return build.output(build.compute("mm", strange, size_bytes=16, flops=10**9))


def test_only_what_runs_on_the_device_costs_time_and_only_what_is_launched_costs_the_cpu() -> None:
    program = _mixed()
    costs = price(program, H200)
    assert set(costs.duration_us) == set(costs.launch_us) == set(program.order)
    running = {"cast", "gather", "strange", "mm"}
    assert {name for name, us in costs.duration_us.items() if us > 0} == running
    assert {name for name, us in costs.launch_us.items() if us > 0} == running
    assert costs.launch_us["gather"] == H200.compute.collective_launch_us
    assert (costs.hardware, costs.contention) == ("h200", H200.contention)


def test_an_op_without_a_formula_is_priced_by_its_traffic_and_listed() -> None:
    costs = price(_mixed(), H200)
    assert costs.unknown == ("strange",)
    assert costs.duration_us["strange"] == pytest.approx(2.0 + H200.traffic_us(64 + 48))


def test_a_collective_of_unknown_kind_is_listed() -> None:
    build = Builder()
    build.wait("w", build.launch("odd", build.input("x", 8), CollectiveKind.OTHER, Role.ACTIVATION, size_bytes=8))
    assert price(build.output("w"), H200).unknown == ("odd",)


def test_measured_times_replace_formulas_and_leave_the_unknown_list() -> None:
    costs = price(_mixed(), H200, measured={"strange": 3.5, "gather": 7, "of another graph": 1.0})
    assert (costs.duration_us["strange"], costs.duration_us["gather"]) == (3.5, 7.0)
    assert costs.unknown == ()
    assert "of another graph" not in costs.duration_us


@pytest.mark.parametrize("time_us", [-1.0, float("nan"), float("inf")])
def test_a_measured_time_that_is_none_is_refused_by_the_ops_name(time_us: float) -> None:
    with pytest.raises(OptionError, match="measured time of 'mm'"):
        price(_mixed(), H200, measured={"mm": time_us})


def test_wires_and_factors_of_each_collective_follow_the_hardware_file() -> None:
    program = _mixed()
    costs = price(program, H200)
    assert costs.wires == {"g0": "intra_node"}
    assert price(program, H200, ranks_per_node={"g0": 1}).wires == {"g0": "inter_node"}
    assert costs.contention_of("gather").communication_beside_compute == 1.69
    assert costs.contention_of("no launch") == H200.contention


def test_a_strided_group_is_priced_by_its_placement() -> None:
    program = _mixed()
    strided = price(program, H200, ranks_per_node={"g0": 1}).duration_us["gather"]
    assert strided == collective_us(program.op("gather").collective or _gather(0), H200, 1)
