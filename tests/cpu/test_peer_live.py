"""The live bench: both sides see one graph, one price of each op, one simulator and one ledger."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch._dynamo.utils import counters
from torch._inductor.fx_passes import overlap_scheduling

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import Category, CollectiveKind, OpKind, Phase
from overlap_pass.profiling.trace_plan import llama_step
from overlap_pass.registry import parse
from overlap_pass.schedule.verify import violations
from tests.bench import peer_live
from tests.bench.torch_pass import ORDER_ONLY, Passed, torch_pass
from tests.bench.traced import Model, Traced, traced

RANKS = 8
HARDWARE = load_hardware("h100")


@pytest.fixture(scope="module")
def graphs() -> Iterator[tuple[Traced, ...]]:
    """Forward and backward of a tiny Llama on the 8 ranks of one node."""
    with traced("tiny", Model((RANKS,), llama_step("tiny", tokens=256)), HARDWARE) as found:
        yield found


@pytest.fixture
def backward(graphs: tuple[Traced, ...]) -> Traced:
    return next(graph for graph in graphs if graph.program.phase is Phase.BACKWARD)


def test_the_order_of_torchs_pass_is_a_legal_order_of_our_program(graphs: tuple[Traced, ...]) -> None:
    for graph in graphs:
        passed = torch_pass(graph, ORDER_ONLY)
        assert passed.program is graph.program
        assert not violations(graph.program, passed.order)
        assert passed.order != graph.program.order, "it moved nothing, so this shows nothing"


def test_the_pass_leaves_the_graph_that_it_is_given_alone(backward: Traced) -> None:
    names = [node.name for node in backward.module.graph.nodes]
    torch_pass(backward, {})
    assert [node.name for node in backward.module.graph.nodes] == names


class _Asked:
    """In the place of the pass: asks for every price, and what counts as compute."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self.resized_ms: dict[int, set[float]] = {0: set(), 2**30: set()}
        self.compute: set[str] = set()

    def __call__(self, module: Any, *, custom_runtime_estimation: Any, **_: Any) -> Any:
        for node in module.graph.nodes:
            self.ms[node.name] = custom_runtime_estimation(node, None)
            if overlap_scheduling.is_compute_node(node):
                self.compute.add(node.name)
            if "all_gather_into_tensor" in str(node.target):
                for size_bytes, found_ms in self.resized_ms.items():
                    found_ms.add(custom_runtime_estimation(node, size_bytes))
        return module


@pytest.fixture
def asked(backward: Traced, monkeypatch: pytest.MonkeyPatch) -> _Asked:
    found = _Asked()
    monkeypatch.setattr(overlap_scheduling, "schedule_overlap_bucketing", found)
    torch_pass(backward, ORDER_ONLY)
    return found


def test_the_pass_is_told_the_prices_that_we_plan_with_in_milliseconds(backward: Traced, asked: _Asked) -> None:
    costs = backward.price(backward.read())
    assert asked.ms == {name: time_us / 1000 for name, time_us in costs.duration_us.items()}
    assert sum(asked.ms.values()) > 0


def test_a_collective_of_another_size_costs_its_latency_and_that_transfer(asked: _Asked) -> None:
    """Of no bytes it takes as long as one that just fills the link."""
    link = HARDWARE.intra_node
    latency_us = link.latency_us + (RANKS - 1) * link.hop_us
    for size_bytes, crossing_bytes in ((0, link.saturation_mb * 1e6), (2**30, 2**30 * (RANKS - 1) / RANKS)):
        (told_ms,) = asked.resized_ms[size_bytes]
        assert told_ms * 1000 == pytest.approx(latency_us + crossing_bytes / (link.bandwidth_gb_per_s * 1e3))


def test_attention_counts_as_compute_as_on_a_gpu(backward: Traced, asked: _Asked) -> None:
    heavy = {op.name for op in backward.program.ops if op.category in (Category.MATMUL, Category.ATTENTION)}
    assert any(op.category is Category.ATTENTION for op in backward.program.ops)
    assert asked.compute == heavy


def test_the_pass_counts_memory_though_tensors_are_on_a_cpu(backward: Traced) -> None:
    counters.clear()
    torch_pass(backward, ORDER_ONLY)
    inputs_bytes = sum(
        storage.size_bytes
        for storage in backward.program.storages
        if backward.program.op(storage.owner).kind is OpKind.INPUT
    )
    assert counters["inductor"]["overlap_original_mem"] > inputs_bytes


def test_buckets_carry_the_same_bytes_in_fewer_launches_and_pay_for_their_copies(backward: Traced) -> None:
    passed = torch_pass(backward, {})
    assert not violations(passed.program, passed.order)
    assert len(passed.program.launches) < len(backward.program.launches)
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        assert _travels_bytes(passed.program, kind) == _travels_bytes(backward.program, kind)
    copies = [op for op in passed.program.ops if op.name not in backward.program.index and op.kind is OpKind.COMPUTE]
    assert sum(passed.costs.duration_us[op.name] for op in copies) > 0


def _travels_bytes(program: Any, kind: CollectiveKind) -> int:
    return sum(op.collective.payload_bytes for op in program.launches if op.collective.kind is kind)


def test_both_sides_are_simulated_and_counted_alike(backward: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """An order gives the same figures whoever made it."""
    bench = peer_live.Bench(backward, parse("as_written"), runs=1)

    def keep(graph: Traced, _: Any) -> Passed:
        return Passed(graph.program, graph.price(graph.program), graph.program.order, 1.0)

    monkeypatch.setattr(peer_live, "torch_pass", keep)
    written, theirs, mine, *_ = bench.rows()
    assert (theirs.order[:5], mine.order[:4]) == ("torch", "ours")
    for row in (theirs, mine):
        assert replace(row, order=written.order, planning_s=None, reading_s=None) == written


def test_an_illegal_order_is_no_row(backward: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(graph: Traced, _: Any) -> Passed:
        return Passed(graph.program, graph.price(graph.program), graph.program.order[::-1], 1.0)

    monkeypatch.setattr(peer_live, "torch_pass", backwards)
    with pytest.raises(ValueError, match="before it exists"):
        list(peer_live.Bench(backward, parse("as_written"), runs=1).rows())


def test_a_failure_of_the_pass_is_told_and_the_others_go_on(backward: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Passed:
        raise RuntimeError("a circle of dependencies\nand more")

    monkeypatch.setattr(peer_live, "torch_pass", fail)
    rows = list(peer_live.Bench(backward, parse("as_written"), runs=1).rows())
    problems = {row.problem for row in rows if row.order.startswith("torch")}
    assert problems == {"RuntimeError: a circle of dependencies"}
    assert len([row for row in rows if row.order.startswith("ours") and not row.problem]) == 7
