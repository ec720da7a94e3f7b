"""The mixture of experts that the live bench traces: what it computes, and who talks to whom."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.profiling import llama
from overlap_pass.profiling.trace_plan import fake_world
from tests.bench.mixture import Mixture, MixtureConfig, mixture
from tests.bench.traced import Model, experts_inside, members_on_a_node, traced

TINY = MixtureConfig(replace(llama.preset("tiny"), ffn_dim=48), experts=8, chosen=2, expert_dim=32)


def test_the_cost_model_is_told_which_ranks_share_a_node() -> None:
    """Of 16 ranks as 2 × 8, nodes of 8: an inner group is one node, an outer one has a rank on each."""
    with fake_world(16):
        mesh = torch.distributed.init_device_mesh("cpu", (2, 8), mesh_dim_names=("outer", "inner"))
        groups = experts_inside(mesh)
        named = (groups.everyone, groups.alike, groups.experts)
        assert [members_on_a_node(one.get_group().group_name, gpus=8) for one in named] == [8, 1, 8]


def test_a_mixture_sends_tokens_to_their_experts_and_back_in_both_directions() -> None:
    model = Model((2, 4), lambda meshes: mixture(TINY, meshes, tokens=64), experts_inside)
    with traced("moe", model, load_hardware("h100")) as graphs:
        for graph in graphs:
            exchanges = [op for op in graph.program.launches if op.collective.kind is CollectiveKind.ALL_TO_ALL]
            assert len(exchanges) == 2 * TINY.decoder.layers
            assert {op.collective.group_size for op in exchanges} == {4}
            assert {op.collective.group_size for op in graph.program.launches} == {2, 4, 8}


def test_a_mixture_is_the_weighted_sum_of_the_chosen_experts() -> None:
    """Of ten tokens that all choose the same two of eight, which have just room for them."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        torch.manual_seed(0)
        layer = Mixture(replace(TINY, slack=4.0), dist.group.WORLD)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        x = torch.randn(TINY.decoder.dim) + 0.01 * torch.randn(2, 5, TINY.decoder.dim)
        expected = layer.shared(x)
        for place in range(10):
            row = x.flatten(0, 1)[place]
            weights, experts = layer.router(row).softmax(-1).topk(TINY.chosen)
            for weight, expert in zip(weights / weights.sum(), experts, strict=True):
                inner = F.silu(row @ layer.routed.gate[expert]) * (row @ layer.routed.up[expert])
                expected.flatten(0, 1)[place] += weight * (inner @ layer.routed.down[expert])
        torch.testing.assert_close(layer(x), expected)
    finally:
        dist.destroy_process_group()
