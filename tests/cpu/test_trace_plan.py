"""Planning for a cluster that is not there, and what the traced programs look like."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import overlap_pass
from overlap_pass.errors import CaptureError, OptionError
from overlap_pass.graph.program import CollectiveKind, OpKind, Phase, Role
from overlap_pass.profiling import llama, trace_plan
from tests.cpu.ranks import fake_ranks

RANKS = 8


@pytest.fixture(scope="module")
def programs():
    """Forward and backward of a tiny Llama on 8 ranks: 2 blocks of 9 parameters, embedding, norm and head."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    with trace_plan.fake_world(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = llama.shard(llama.Llama(llama.preset("tiny")), mesh=mesh)
            batch = torch.zeros((1, 64), dtype=torch.long)
            return trace_plan.trace(overlap_pass.make_traceable(model), (batch, batch))


def test_every_parameter_is_gathered_in_forward_and_reduced_in_backward(programs) -> None:
    forward, backward = programs
    assert (forward.phase, backward.phase) == (Phase.FORWARD, Phase.BACKWARD)
    parameters = 2 * 9 + 3
    assert [op.collective.kind for op in forward.launches] == [CollectiveKind.ALL_GATHER] * parameters
    reductions = [op for op in backward.launches if op.collective.kind is CollectiveKind.REDUCE_SCATTER]
    assert len(reductions) == parameters
    assert {op.collective.role for op in reductions} == {Role.GRADIENT}


def test_gathered_parameters_are_gathered_again_in_backward_and_not_saved(programs) -> None:
    """The root keeps its parameters (FSDP2's rule); of a block, the two norm weights' gradients need no gathered weight
    of a norm only where the norm's own input gradient does: all nine are read again by the backward."""
    forward, backward = programs
    gathers = [op for op in backward.launches if op.collective.kind is CollectiveKind.ALL_GATHER]
    assert {op.collective.unit for op in gathers} == {"blocks.0", "blocks.1"}
    gathered = {storage for op in forward.launches if op.collective.unit for storage in op.storages}
    returned = {storage for name in forward.ops[-1].inputs for storage in forward.op(name).storages}
    assert not gathered & returned, "a gathered parameter of a block leaves the forward as a saved activation"


def test_a_wait_names_its_launch_and_shares_its_memory(programs) -> None:
    for program in programs:
        for op in program.ops:
            if op.kind is OpKind.WAIT:
                assert op.storages == program.op(op.launch).storages


def test_a_shard_is_an_eighth_of_what_is_gathered(programs) -> None:
    forward, _ = programs
    for launch in forward.launches:
        assert launch.collective.group_size == RANKS
        assert launch.written_bytes == RANKS * launch.read_bytes


def test_the_program_is_the_same_on_another_trace(programs) -> None:
    from overlap_pass.graph.program import Program

    for program in programs:
        assert Program.from_json(program.to_json()).digest == program.digest


def test_planning_leaves_no_process_group_behind_and_reports_both_graphs() -> None:
    said: list[str] = []
    comparison = overlap_pass.plan(
        _two_layers, world_size=4, options={"hardware": "a100", "memory_budget": "unlimited"}, progress=said.append
    )
    assert not dist.is_initialized()
    assert comparison.before.predicted
    assert comparison.after.step_median_us <= comparison.before.step_median_us
    assert any("forward" in line for line in said)
    assert any("backward" in line for line in said)


def _two_layers(mesh) -> tuple[nn.Module, tuple[torch.Tensor]]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            return x.sum()

    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), (torch.zeros(8, 64),)


def test_one_rank_has_nothing_to_plan() -> None:
    with pytest.raises(OptionError, match="world=1"):
        overlap_pass.plan(_two_layers, world_size=1)


def test_planning_inside_a_process_group_is_refused() -> None:
    with fake_ranks(2), pytest.raises(CaptureError, match="process of its own"):
        overlap_pass.plan(_two_layers, world_size=4)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(OptionError, match="llama3-8b"):
        trace_plan.plan_llama("llama3-8", world_size=8, tokens=64)
