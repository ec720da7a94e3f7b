"""Torch's manual bucketing on the graph that we capture: one bucket a unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import flop_counter

from overlap_pass.errors import EnvironmentRefused
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.profiling import llama, peers
from overlap_pass.rewrite.partition import partition
from tests.cpu.ranks import fake_ranks


@pytest.fixture
def world():
    with fake_ranks(2):
        yield


def test_a_bucket_is_a_unit_or_what_the_root_holds_between_units(world) -> None:
    model = make_traceable(llama.shard(llama.Llama(llama.preset("tiny"))))
    assert peers.buckets(model) == [["embedding"], ["blocks.0"], ["blocks.1"], ["norm", "head"]]


def test_torchs_pass_finds_the_collectives_of_each_bucket(world, monkeypatch) -> None:
    """Its estimates of compute need a GPU and are set aside; buckets do not depend on them."""
    scheduling = pytest.importorskip("torch._inductor.fx_passes.overlap_manual_scheduling")
    for name in ("get_device_tflops", "get_gpu_dram_gbps"):
        monkeypatch.setattr(f"torch._inductor.utils.{name}", lambda *_: 100.0)
    monkeypatch.setattr(
        "torch._inductor.fx_passes.overlap_scheduling.estimate_roofline_runtime_ms", lambda *_, **__: 1.0, raising=False
    )
    model = make_traceable(llama.shard(llama.Llama(llama.preset("tiny"))))
    plan = peers.buckets(model)
    counts: list[tuple[int, int]] = []

    def bucketed(graph_module: Any, _: Any) -> Any:
        before = _launches(graph_module)
        scheduling.manual_overlap_bucketing(graph_module, plan, module_stack_fn=peers._stack)
        counts.append((before, _launches(graph_module)))

        def run(arguments: list[Any]) -> Any:
            return graph_module.forward(*arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = aot_autograd(fw_compiler=bucketed, bw_compiler=bucketed, partition_fn=partition)
    tokens = torch.zeros((1, 16), dtype=torch.long)
    try:
        torch.compile(model, backend=backend, fullgraph=True)(tokens, tokens).backward()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"this torch's pass does not run without a GPU: {error}")
    (forward, forward_bucketed), (_, backward_bucketed) = counts
    assert forward == 21
    assert forward_bucketed == 4, "one all-gather a bucket"
    assert backward_bucketed <= 2 * 4, "at most an all-gather and a reduce-scatter a bucket"


def test_a_torch_without_the_pass_says_so(world, monkeypatch) -> None:
    monkeypatch.setattr(peers, "import_module", lambda name: object())
    with pytest.raises(EnvironmentRefused, match=r"has no .*manual_overlap_bucketing: leave torch-manual out"):
        peers.torch_manual(nn.Linear(1, 1))


def _launches(graph_module: Any) -> int:
    names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
    return sum("all_gather_into_tensor" in name or "reduce_scatter_tensor" in name for name in names)


def test_attention_of_grouped_heads_is_counted_as_with_repeated_keys(monkeypatch) -> None:
    """torch 2.11 refuses to count it, and its overlap scheduling, which counts everything, with it."""

    def strict(*shapes: tuple[int, ...]) -> int:
        batch, heads, length, width = shapes[-3]
        if any(shape[1] != heads for shape in shapes):
            raise AssertionError("heads differ")
        return batch * heads * length * width

    monkeypatch.setattr(flop_counter, "sdpa_flop_count", strict)
    monkeypatch.setattr(flop_counter, "sdpa_backward_flop_count", strict)
    peers._count_grouped_heads()
    queries, keys, values = (2, 8, 16, 4), (2, 2, 32, 4), (2, 2, 32, 6)
    assert flop_counter.sdpa_flop_count(queries, keys, values) == 2 * 8 * 16 * 4
    assert flop_counter.sdpa_backward_flop_count((2, 8, 16, 6), queries, keys, values) == 2 * 8 * 16 * 4


def test_what_torch_counts_itself_is_left_to_it() -> None:
    known = flop_counter.sdpa_flop_count
    try:
        known((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))
    except AssertionError:
        pytest.skip("this torch does not count grouped heads")
    peers._count_grouped_heads()
    assert flop_counter.sdpa_flop_count is known
