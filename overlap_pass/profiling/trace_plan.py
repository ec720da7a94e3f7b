"""Plan a model for a cluster that is not there: fake process group, fake tensors, no GPU, no memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_pass.config import Config
from overlap_pass.errors import CaptureError, OptionError
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.graph.program import Phase, Program
from overlap_pass.graph.read import phase_of, read_program
from overlap_pass.planning import plan_step
from overlap_pass.profiling import llama
from overlap_pass.profiling.modes import launching
from overlap_pass.report.comparison import Comparison
from overlap_pass.report.from_plans import compare_plans
from overlap_pass.rewrite.partition import partition
from overlap_pass.rewrite.reshard import PartitionByBudget
from overlap_pass.rewrite.transport import carry
from overlap_pass.spec import spec
from overlap_pass.transport.choice import Carriers

__all__ = ["Build", "fake_world", "llama_step", "plan_llama", "plan_model", "trace", "trace_graphs", "trace_model"]

Report = Callable[[str], None]

Build = Callable[[DeviceMesh], tuple[nn.Module, Sequence[Any]]]
"""Mesh → sharded model and its inputs."""

Cut = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


@contextlib.contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """A process group of ``ranks`` ranks of which only rank 0 exists and no collective moves anything.

    Raises:
        CaptureError: this process is in a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise CaptureError(
            f"planning for {ranks} ranks needs a process outside any process group, and this one is rank "
            f"{dist.get_rank()} of {dist.get_world_size()}: plan in a process of its own"
        )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def trace(
    model: nn.Module, inputs: Sequence[Any], *, cut: Cut = partition, carriers: Carriers | None = None
) -> tuple[Program, ...]:
    """Forward and backward program of ``model(*inputs)``, whose result must be a scalar loss.

    The graphs are those that Inductor would start from: its decompositions, the min-cut partitioner, ZeRO-3 kept.

    Args:
        cut: joint graph → forward and backward graph, a ``partition_fn`` of AOTAutograd.
        carriers: what carries the collectives, where it is not the communicator.

    Raises:
        CaptureError: the model does not trace into one graph.
    """
    return tuple(program for program, _ in trace_graphs(model, inputs, cut=cut, carriers=carriers))


def trace_graphs(
    model: nn.Module, inputs: Sequence[Any], *, cut: Cut = partition, carriers: Carriers | None = None
) -> tuple[tuple[Program, fx.GraphModule], ...]:
    """The same, each program with the graph that it was read from; arguments and errors as for :func:`trace`."""
    found: list[tuple[Program, fx.GraphModule]] = []

    def collect(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        if carriers is not None:
            carry(gm.graph, carriers)
        phase = phase_of(gm.graph)
        program = read_program(gm.graph, phase, name=phase.value)
        if program.launches:  # Dynamo may add a graph of its own that only hands values on
            found.append((program, gm))
        return _unboxed(gm)

    backend = aot_autograd(
        fw_compiler=collect, bw_compiler=collect, partition_fn=cut, decompositions=select_decomp_table()
    )
    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*inputs).backward()
    except torch._dynamo.exc.Unsupported as error:
        raise CaptureError(f"{type(model).__name__} does not trace into one graph: {error}") from error
    finally:
        torch._dynamo.reset()
    if [program.phase for program, _ in found] != [Phase.FORWARD, Phase.BACKWARD]:
        names = ", ".join(program.name for program, _ in found) or "none"
        raise CaptureError(f"{type(model).__name__}: expected a forward and a backward graph, got: {names}")
    return tuple(found)


def _unboxed(gm: fx.GraphModule) -> Callable[..., Any]:
    def run(arguments: list[Any]) -> Any:
        return gm.forward(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def trace_model(
    build: Build,
    *,
    world_size: int | Sequence[int],
    progress: Report = lambda _: None,
    cut: Cut = partition,
    carriers: Carriers | None = None,
) -> tuple[Program, ...]:
    """Forward and backward program of one training step on ``world_size`` ranks; arguments and errors as below."""
    shape = (world_size,) if isinstance(world_size, int) else tuple(world_size)
    ranks = math.prod(shape)
    if ranks < 2:
        raise OptionError(f"world={_times(world_size)}: with fewer than 2 ranks nothing is communicated")
    with fake_world(ranks):
        progress(f"tracing on {_times(world_size)} ranks")
        names = ("replicate", "shard") if len(shape) == 2 else None  # fully_shard asks for names where there are two
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)  # reads values, which fake tensors have none of
        # Constants that decompositions lift into the graph are real tensors.
        with FakeTensorMode(allow_non_fake_inputs=True):
            model, inputs = build(mesh)
            return trace(make_traceable(model), inputs, cut=cut, carriers=carriers)


def _times(world_size: int | Sequence[int]) -> str:
    return str(world_size) if isinstance(world_size, int) else "x".join(map(str, world_size))


def plan_model(
    build: Build,
    *,
    world_size: int | Sequence[int],
    options: Mapping[str, Any] | None = None,
    title: str = "",
    setting: tuple[tuple[str, str], ...] = (),
    progress: Report = lambda _: None,
) -> Comparison:
    """Plan one training step (forward and backward) of a model for a cluster that need not be there.

    Args:
        build: called with a device mesh over all ranks; shards a model on it with ``fully_shard`` and returns the model
            and its inputs, ``model(*inputs)`` being the loss. Runs under fake tensors: nothing is allocated, so a model of
            any size can be built, and no value can be read (so no further mesh can be made in it).
        world_size: ranks, which is a mesh of one dimension; or the mesh's shape, ``(2, 4)`` for two replicas of four shards
            each (dimensions ``replicate`` and ``shard``).
        options: the backend's options (strategy, memory_budget, hardware, coalesce, reshard, transport, reduction,
            final_places, mode).
        title: what the report calls it.
        setting: (name, value) pairs for the report.
        progress: called with what is being done.

    Raises:
        CaptureError: the model does not trace into one graph, or this process is in a process group already.
        OptionError: an option or the world size is not accepted.
        InfeasibleBudget: the budget is below what the step needs.
    """
    config = Config.from_options(options)
    hardware = launching(config.hardware_for(None), config.mode)
    carriers = Carriers(config.transport, config.reduction)
    by_budget = PartitionByBudget(hardware, config.memory_budget, carriers) if config.reshard == "auto" else None
    programs = trace_model(
        build, world_size=world_size, progress=progress, cut=by_budget or partition, carriers=carriers
    )
    budget = config.memory_budget if by_budget is None else by_budget.budget
    plans = plan_step(programs, hardware, config.strategy, budget, launches=config.launches, progress=progress)
    found = (
        ("ranks", f"{_times(world_size)} × {hardware.name}"),
        ("strategy", spec(config.strategy)),
        ("memory budget", config.memory_budget.spec),
        ("coalesce", str(config.coalesce)),
        ("transport", config.transport),
        ("reduction", config.reduction),
        ("final places", config.final_places),
        ("mode", config.mode),
        *(() if by_budget is None else by_budget.setting()),
        ("torch", torch.__version__),
    )
    return compare_plans(plans, title=title or f"{_times(world_size)} × {hardware.name}", setting=(*setting, *found))


def plan_llama(
    preset: str,
    *,
    world_size: int,
    tokens: int,
    options: Mapping[str, Any] | None = None,
    progress: Report = lambda _: None,
) -> Comparison:
    """Plan one training step of a preset of ``profiling.llama`` with FSDP over all ranks.

    Parameters are fp32 shards, computed with in bf16, gradients reduced in fp32. Errors as for :func:`plan_model`.

    Args:
        tokens: tokens per rank and step, in sequences of at most 4096.
    """
    hardware = Config.from_options(options).hardware_for(None)
    return plan_model(
        llama_step(preset, tokens),
        world_size=world_size,
        options=options,
        title=f"{preset} on {world_size} × {hardware.name}",
        setting=(
            ("model", f"{preset}, forward + backward"),
            ("tokens per rank", str(tokens)),
            ("precision", "bf16 parameters in compute, fp32 shards and reduction"),
        ),
        progress=progress,
    )


def llama_step(preset: str, tokens: int) -> Build:
    """Builds a preset of ``profiling.llama`` with FSDP over all ranks, and its inputs.

    Parameters are fp32 shards, computed with in bf16, gradients reduced in fp32.

    Args:
        tokens: tokens per rank and step, in sequences of at most 4096.

    Raises:
        OptionError: unknown preset.
    """
    shape = llama.preset(preset)
    length = min(tokens, 4096, shape.max_tokens)

    def build(mesh: DeviceMesh) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        batch = torch.zeros((max(tokens // length, 1), length), dtype=torch.long)
        return llama.shard(llama.Llama(shape), mesh=mesh, mp_policy=policy), (batch, batch)

    return build
