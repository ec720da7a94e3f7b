"""What a compilation leaves behind: the compiled model and nothing else, whether it succeeds or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.utils import fresh_cache
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

import overlap_pass
from compile_backends import compilation
from overlap_pass.errors import InfeasibleBudget, PlanError
from tests.cpu.ranks import fake_ranks
from tests.cpu.test_backend_order import configuration

BACKENDS = ("overlap", "overlap_eager")


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fresh_cache(), fake_ranks(2):
        yield


def small() -> nn.Module:
    """As small as may be: Inductor compiles it time and again."""
    return fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))


def step(model: Callable[..., Any]) -> None:
    model(torch.ones(2, 4)).sum().backward()


@contextmanager
def failing(at: int) -> Iterator[None]:
    """Planning of the graph of that number fails: 0 is the forward's, 1 the backward's."""
    calls: list[None] = []
    make_plan = compilation.make_plan

    def fails(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == at + 1:
            raise PlanError("on purpose")
        return make_plan(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, "make_plan", fails)
        yield


# -- what is compiled, and how it ends


def trained(model: nn.Module, backend: str) -> None:
    step(torch.compile(model, backend=backend, fullgraph=True))


def carried(model: nn.Module, backend: str) -> None:
    options = {"transport": "copy_engine", "reduction": "exchange", "reshard": "auto"}
    step(torch.compile(model, backend=backend, fullgraph=True, options=options))


def refused(model: nn.Module, backend: str) -> None:
    with pytest.raises(BackendCompilerFailed) as raised:
        step(torch.compile(model, backend=backend, options={"memory_budget": "8B"}))
    assert isinstance(raised.value.inner_exception, InfeasibleBudget)


def failed_in_backward(model: nn.Module, backend: str) -> None:
    with failing(1), pytest.raises((PlanError, BackendCompilerFailed), match="on purpose"):
        step(torch.compile(model, backend=backend))


def restored(model: nn.Module, backend: str) -> None:
    overlap_pass.restore(overlap_pass.make_traceable(model))


ENDS = {function.__name__: function for function in (trained, carried, refused, failed_in_backward, restored)}


def state_of_torch() -> dict[str, Any]:
    """Settings of the compiler and of the process; and the random state, since a compilation draws nothing."""
    return {
        **configuration(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "random": torch.get_rng_state().tolist(),
        "groups": list(distributed_c10d._world.pg_map),
        "modes": torch.utils._python_dispatch._len_torch_dispatch_stack(),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("end", ENDS)
def test_torch_is_what_it_was(end: str, backend: str) -> None:
    model = small()
    before = state_of_torch()
    ENDS[end](model, backend)
    after = state_of_torch()
    assert {name for name, value in before.items() if after[name] != value} == set()
    assert len(before) > 100


# -- the model after a failure


@pytest.mark.parametrize("at", [0, 1], ids=["forward", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_whose_compilation_failed_can_be_used_compiled_and_restored(backend: str, at: int) -> None:
    model = small()
    before = hooked(model)
    with failing(at), pytest.raises((PlanError, BackendCompilerFailed), match="on purpose"):
        step(torch.compile(model, backend=backend))
    for call in (model, torch.compile(model, backend=backend)):
        torch._dynamo.reset()
        model.zero_grad()
        step(call)
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert hooked(overlap_pass.restore(model)) == before


def hooked(model: nn.Module) -> list[Any]:
    """Classes and hooks; torch's compiler leaves attributes of its own on a module."""
    return [(type(m), list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()]


# -- passes of the user's


class Counted(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Any) -> Any:
        self.calls += 1
        return graph

    def uuid(self) -> str:
        return "counted"


class Partitioner(CustomPartitionerFn):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gm: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        self.calls += 1
        return min_cut_rematerialization_partition(gm, inputs, **options)

    def uuid(self) -> str:
        return "counted"


PASSES = {
    **dict.fromkeys(("joint_custom_pre_pass", "joint_custom_post_pass"), (Counted, 1)),
    **dict.fromkeys(("post_grad_custom_pre_pass", "post_grad_custom_post_pass"), (Counted, 2)),
    **dict.fromkeys(("_pre_fusion_custom_pass", "_post_fusion_custom_pass"), (Counted, 2)),
    "custom_partitioner_fn": (Partitioner, 1),
}
"""Setting → what is there, and how often one step runs it: for the joint graph, or for forward and backward."""


def test_passes_of_the_users_run_as_often_as_without_us_and_stay() -> None:
    users = {setting: kind() for setting, (kind, _) in PASSES.items()}
    with inductor_config.patch(users):
        trained(small(), "overlap")
        assert {setting: getattr(inductor_config, setting) for setting in PASSES} == users
    assert {setting: one.calls for setting, one in users.items()} == {setting: n for setting, (_, n) in PASSES.items()}


def test_ours_do_not_run_in_what_others_compile() -> None:
    """A model under plain Inductor behind one under ``overlap``."""
    trained(small(), "overlap")
    with failing(0):
        torch.compile(nn.Linear(3, 5), backend="inductor")(torch.ones(2, 3)).sum().backward()
