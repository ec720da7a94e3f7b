"""Copy engines in the planner: their price, their lane, their kernels on the compute lane, and the memory they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.contention import Contention
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.graph.program import Collective, CollectiveKind, Lease, OpKind, OpNode, Phase, Program, Role, Storage
from overlap_pass.memory.ledger import peak
from overlap_pass.memory.staging import staging_bytes
from overlap_pass.simulate.engine import simulate

H200 = load_hardware("h200")
MB = 1_000_000


COLLECTIVE = Collective(
    CollectiveKind.ALL_GATHER, "g0", 2, 400 * MB, "bfloat16", Role.PARAMETER, "block", "weight", True
)


def gathering(by_copy: bool, ranks: int = 2) -> Program:
    """A matmul, a gather launched in front of it, and what reads the gathered parameter."""
    collective = replace(COLLECTIVE, group_size=ranks, by_copy=by_copy)
    matmul = OpNode(
        "mm", OpKind.COMPUTE, "aten.mm", ("shard",), (2,), dtype="bfloat16", flops=10**12, read_bytes=1, written_bytes=1
    )
    return Program(
        "forward",
        Phase.FORWARD,
        (
            OpNode("shard", OpKind.INPUT, "input", storages=(0,)),
            OpNode(
                "launch", OpKind.LAUNCH, "gather", ("shard",), (1,), read_bytes=400 * MB, written_bytes=400 * MB,
                collective=collective, kernel=by_copy,
            ),
            matmul,
            OpNode("wait", OpKind.WAIT, "wait", ("launch",), (1,), launch="launch"),
            OpNode("output", OpKind.OUTPUT, "output", ("wait", "mm")),
        ),
        (Storage(0, 400 * MB, "shard", held=True), Storage(1, 400 * MB, "launch"), Storage(2, 1, "mm")),
        {"g0": ranks},
    )  # fmt: skip


def test_a_copy_takes_its_latency_and_the_peers_part_over_its_bandwidth() -> None:
    engine = H200.copy_engine
    assert engine is not None
    costs = price(gathering(by_copy=True), H200)
    assert costs.duration_us["launch"] == pytest.approx(
        engine.latency_us + 200 * MB / (engine.bandwidth_gb_per_s * 1e3)
    )


def test_the_cast_into_two_places_and_the_words_before_it_are_compute() -> None:
    program = gathering(by_copy=True)
    costs = price(program, H200)
    assert H200.copy_engine is not None
    # 400 MB of float32 read, 200 MB of bfloat16 written twice.
    cast_us = H200.compute.kernel_us + H200.traffic_us(800 * MB)
    assert costs.kernel_us["launch"] == pytest.approx(cast_us + H200.copy_engine.handshake_us)
    found = simulate(program, replace(costs, launch_us={}, beside_compute={}, contention=Contention()))
    assert found.compute_us == pytest.approx(costs.kernel_us["launch"] + costs.duration_us["mm"])


def test_a_cast_into_shared_memory_writes_once() -> None:
    program = gathering(by_copy=True)
    program = replace(program, leases={"launch": Lease(400 * MB, 0, 400 * MB, (True,), 400 * MB)})
    assert H200.copy_engine is not None
    # 400 MB of float32 read, 200 MB of bfloat16 written once.
    cast_us = H200.compute.kernel_us + H200.traffic_us(600 * MB)
    assert price(program, H200).kernel_us["launch"] == pytest.approx(cast_us + H200.copy_engine.handshake_us)


@pytest.mark.parametrize(("by_copy", "shares"), [(True, 2), (False, None)])
def test_sums_of_one_launch_share_its_words_and_communicators_have_none(by_copy: bool, shares: int | None) -> None:
    reduction = Collective(
        CollectiveKind.REDUCE_SCATTER, "g0", 2, 8 * MB, "bfloat16", Role.GRADIENT, direct=True, by_copy=by_copy
    )
    launch = OpNode("launch", OpKind.LAUNCH, "exchange", ("grad",), (1, 2), collective=reduction)
    finishes = tuple(
        OpNode(f"sum{n}", OpKind.WAIT, "finish", ("launch",), (2 + n,), read_bytes=4 * MB, written_bytes=8 * MB,
               launch="launch", kernel=True)
        for n in (1, 2)
    )  # fmt: skip
    ops = (OpNode("grad", OpKind.INPUT, "input", storages=(0,)), launch, *finishes)
    storages = tuple(Storage(number, 8 * MB, "grad") for number in range(5))
    costs = price(Program("backward", Phase.BACKWARD, ops, storages, {"g0": 2}), H200)
    handshake_us = H200.copy_engine.handshake_us / shares if H200.copy_engine and shares else 0.0
    sum_us = H200.compute.kernel_us + H200.traffic_us(12 * MB)
    assert [costs.kernel_us[f"sum{n}"] for n in (1, 2)] == pytest.approx([sum_us + handshake_us] * 2)


def test_gradients_that_go_directly_contend_as_the_all_to_all_that_carries_them() -> None:
    ring, direct = (
        replace(Collective(CollectiveKind.REDUCE_SCATTER, "g0", 2, MB, "bfloat16", Role.GRADIENT), direct=direct)
        for direct in (False, True)
    )
    ops = [
        OpNode(name, OpKind.LAUNCH, "collective", collective=collective)
        for name, collective in (("ring", ring), ("direct", direct))
    ]
    slower = replace(H200.contention, communication_beside_compute=1.8)
    own = {**H200.contention_by_kind, CollectiveKind.ALL_TO_ALL: slower}
    costs = price(Program("g", Phase.BACKWARD, tuple(ops), ()), replace(H200, contention_by_kind=own))
    assert costs.contention_of("direct") == slower
    assert costs.contention_of("ring") == H200.contention_by_kind[CollectiveKind.REDUCE_SCATTER]
    assert price(Program("g", Phase.BACKWARD, tuple(ops), ()), H200).contention_of("direct") == costs.contention_of(
        "ring"
    )


def test_a_copy_starts_in_the_middle_of_a_kernel_and_a_communicator_waits_for_its_end() -> None:
    def second_start_us(by_copy: bool) -> float:
        program = gathering(by_copy)
        shard, launch, matmul, wait, output = program.ops
        second = replace(launch, name="second", storages=(3,))
        waits = (wait, replace(wait, name="second wait", inputs=("second",), storages=(3,), launch="second"))
        program = replace(
            program,
            ops=(shard, launch, second, matmul, *waits, replace(output, inputs=("wait", "second wait", "mm"))),
            storages=(*program.storages, Storage(3, 400 * MB, "second")),
        )
        costs = replace(price(program, H200), kernel_us={}, launch_us={}, beside_compute={}, contention=Contention())
        costs = replace(costs, duration_us={"launch": 100.0, "second": 100.0, "mm": 150.0})
        spans = {span.name: span for span in simulate(program, costs).timeline.spans}
        return spans["second"].start_ns / 1e3

    # Copies: the first ends at 100, in the middle of the matmul, which runs until 150.
    assert second_start_us(by_copy=True) == 100.0
    # Kernels: the matmul has the device first, so that the first runs from 150 to 250.
    assert second_start_us(by_copy=False) == 250.0


def test_staging_memory_holds_the_largest_gather_three_times_and_counts_from_the_start() -> None:
    assert staging_bytes(gathering(by_copy=True)) == 3 * 200 * MB
    assert staging_bytes(gathering(by_copy=True, ranks=8)) == 3 * 50_000_128  # the next multiple of 256 bytes
    assert staging_bytes(gathering(by_copy=False)) == 0
    by_copy, by_kernel = peak(gathering(by_copy=True)), peak(gathering(by_copy=False))
    assert by_copy.base_bytes == by_kernel.base_bytes + 600 * MB
    assert by_copy.peak_bytes == by_kernel.peak_bytes + 600 * MB


def test_hardware_without_copy_engines_prices_them_as_its_communicator() -> None:
    without = replace(H200, copy_engine=None)
    assert (
        price(gathering(True), without).duration_us["launch"] == price(gathering(False), without).duration_us["launch"]
    )


def test_a_recorded_graph_costs_the_host_next_to_nothing() -> None:
    program = gathering(by_copy=True)
    launched, replayed = (sum(price(program, hardware).launch_us.values()) for hardware in (H200, H200.replaying()))
    assert replayed < launched / 10
    assert price(program, H200.replaying()).duration_us == price(program, H200).duration_us


def test_copies_of_all_groups_run_one_after_the_other() -> None:
    costs = price(gathering(by_copy=True), H200)
    assert {costs.lane_of("launch", replace(COLLECTIVE, group=group)) for group in ("g0", "g1")} == {"copy engine"}
    assert price(gathering(by_copy=False), H200).lanes == {}


def _burst(kind: CollectiveKind, count: int) -> Program:
    """So many launches by copy, one after the other, and then all their waits."""
    collective = replace(COLLECTIVE, kind=kind)
    numbers = range(count)
    launches = [
        OpNode(f"launch {n}", OpKind.LAUNCH, "start", ("shard",), (n + 1,), collective=collective, kernel=True)
        for n in numbers
    ]
    waits = [
        OpNode(f"wait {n}", OpKind.WAIT, "wait", (f"launch {n}",), (n + 1,), launch=f"launch {n}", kernel=True)
        for n in numbers
    ]
    shard = OpNode("shard", OpKind.INPUT, "input", storages=(0,))
    output = OpNode("output", OpKind.OUTPUT, "output", tuple(wait.name for wait in waits))
    storages = (Storage(0, 400 * MB, "shard", held=True), *(Storage(n + 1, 400 * MB, f"launch {n}") for n in numbers))
    return Program("burst", Phase.FORWARD, (shard, *launches, *waits, output), storages, {"g0": 2})


def test_room_is_kept_for_one_sum_that_is_made_early() -> None:
    """Four places for what the one peer sends, and a result of 100 MB beside the gradient that it takes the place of."""
    program = _burst(CollectiveKind.REDUCE_SCATTER, 3)
    sizes = {"wait 0": 40 * MB, "wait 1": 100 * MB, "wait 2": 60 * MB}
    ops = tuple(replace(op, written_bytes=sizes.get(op.name, op.written_bytes)) for op in program.ops)
    assert staging_bytes(program) == 4 * 200 * MB
    assert staging_bytes(replace(program, ops=ops)) == 4 * 200 * MB + 100 * MB


def _spans(program: Program, kernels: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Lane and op → start and end in µs; a copy takes 100, a kernel of the launches (or waits) 10."""
    ops = [op.name for op in program.ops]
    costs = CostTable(
        duration_us={name: 100.0 for name in ops if name.startswith("launch")},
        kernel_us={name: 10.0 for name in ops if name.startswith(kernels)},
        launch_us={},
        contention=Contention(),
    )
    found = simulate(program, costs).timeline.spans
    return {(span.lane, span.name): (span.start_ns / 1e3, span.end_ns / 1e3) for span in found}


def test_a_cast_waits_until_the_peers_have_fetched_what_was_in_its_place() -> None:
    """Three gathers have room. Casts run 0–10, 10–20, 20–30, copies 10–110, 110–210, …: the fourth cast begins at 110."""
    spans = _spans(_burst(CollectiveKind.ALL_GATHER, 5), "launch")
    casts = [spans["compute", f"launch {number}"][0] for number in range(5)]
    assert casts == [0, 10, 20, 110, 210]


def test_a_cast_waits_for_who_is_in_its_settled_place_and_for_no_other() -> None:
    """Staged parts of five launches: the fourth comes to the second's place, and the fifth to one that nobody had."""
    starts = (0, 200, 400, 200, 600)
    program = _burst(CollectiveKind.ALL_GATHER, 5)
    leases = {f"launch {n}": Lease(800 * MB, start * MB, 200 * MB, (False,), 0) for n, start in enumerate(starts)}
    spans = _spans(replace(program, leases=leases), "launch")
    # Copies end at 110, 210, 310, …
    assert [spans["compute", f"launch {number}"][0] for number in range(5)] == [0, 10, 20, 210, 220]


def test_gradients_are_summed_before_others_take_their_place() -> None:
    """Four reductions have room. The fifth starts when the first has arrived, at 100, and was summed, at 110."""
    spans = _spans(_burst(CollectiveKind.REDUCE_SCATTER, 5), "wait")
    lane = next(lane for lane, name in spans if lane != "compute")
    assert spans["compute", "wait 0"] == (100, 110)
    assert [spans["compute", f"wait {number}"][0] for number in range(1, 5)] == [200, 300, 400, 500]
    assert spans[lane, "launch 4"] == (400, 500)


def test_collectives_of_a_communicator_need_no_place() -> None:
    program = _burst(CollectiveKind.ALL_GATHER, 5)
    ops = (
        op if op.collective is None else replace(op, collective=replace(op.collective, by_copy=False))
        for op in program.ops
    )
    spans = _spans(replace(program, ops=tuple(ops)), "launch")
    assert [spans["compute", f"launch {number}"][0] for number in range(5)] == [0, 10, 20, 30, 40]


def test_gradients_that_are_exchanged_go_at_the_rate_of_an_all_to_all() -> None:
    host = load_hardware("h200-host-staged")
    ring = replace(COLLECTIVE, kind=CollectiveKind.REDUCE_SCATTER, payload_bytes=2**28, by_copy=False)
    around, direct = (collective_us(one, host) for one in (ring, replace(ring, direct=True)))
    assert around == pytest.approx(25 + 5 + 2**27 / 24.2e3)
    assert direct == pytest.approx(25 + 5 + 2**27 / 21e3)
    assert collective_us(replace(ring, direct=True), H200) == collective_us(ring, H200), "no rate of its own there"
