"""All-gathers over gloo take the way that does not break the heap, and gather the same."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx

from overlap_pass.rewrite.over_gloo import gather_by_base
from overlap_pass.transport import ops
from tests.cpu.ranks import fake_ranks

C10D = torch.ops._c10d_functional
SHARD = torch.arange(6.0).view(3, 2)


@pytest.fixture
def gloo() -> Iterator[str]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def gathers(group_name: str) -> fx.GraphModule:
    """A gather alone, and two in one call."""
    graph = fx.Graph()
    shard = graph.placeholder("shard")
    one = graph.call_function(C10D.all_gather_into_tensor.default, (shard, 1, group_name))
    both = graph.call_function(C10D.all_gather_into_tensor_coalesced.default, ([shard, shard], 1, group_name))
    parts = [graph.call_function(operator.getitem, (both, index)) for index in range(2)]
    one.meta["val"], both.meta["val"] = SHARD, [SHARD, SHARD]
    graph.output([graph.call_function(C10D.wait_tensor.default, (part,)) for part in (one, *parts)])
    return fx.GraphModule(torch.nn.Module(), graph)


def targets(gm: fx.GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"][:2]


def test_gathers_over_gloo_are_replaced_and_gather_the_same(gloo: str) -> None:
    gm = gathers(gloo)
    gather_by_base(gm.graph)
    gm.recompile()
    assert targets(gm) == [ops.GATHER_START, ops.GATHER_START_COALESCED]
    for gathered in gm(SHARD):
        assert torch.equal(gathered, SHARD)


def test_gathers_of_other_backends_are_left_as_they_are() -> None:
    with fake_ranks(1):
        gm = gathers(dist.group.WORLD.group_name)
        gather_by_base(gm.graph)
        assert targets(gm) == [C10D.all_gather_into_tensor.default, C10D.all_gather_into_tensor_coalesced.default]


def test_the_gather_of_copies_off_cuda_does_not_take_the_coalesced_way(
    gloo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("this one breaks the heap over gloo")

    monkeypatch.setattr(C10D, "all_gather_into_tensor", refused)
    started = ops.GATHER_START(SHARD, torch.bfloat16, 1, gloo, [])
    assert torch.equal(C10D.wait_tensor(started), SHARD.bfloat16())
