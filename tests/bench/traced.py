"""Graphs of real models, traced here: the forward and backward that Inductor would start from, as FX graphs and as programs.

Tracing is that of ``overlap-pass plan``: fake process group, fake tensors, one rank of as many as the mesh has.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.fx as fx
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass import make_traceable
from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable, price
from overlap_pass.graph.program import Phase, Program
from overlap_pass.graph.read import read_program
from overlap_pass.graph.targets import group_of
from overlap_pass.profiling.trace_plan import fake_world, llama_step, trace_graphs
from tests.bench.mixture import DEEPSEEK_16B, Meshes, mixture

__all__ = [
    "MODELS",
    "PHASES",
    "Model",
    "Traced",
    "experts_inside",
    "members_on_a_node",
    "prices_of",
    "traced",
]

PHASES = {"fw": Phase.FORWARD, "bw": Phase.BACKWARD}
"""End of a graph's name → its phase."""

Built = tuple[nn.Module, Sequence[Any]]


def _itself(mesh: DeviceMesh) -> DeviceMesh:
    return mesh


@dataclass(frozen=True, slots=True)
class Model:
    """A model on a mesh.

    Attributes:
        shape: ranks in each dimension.
        build: what ``meshes`` gives → sharded model and its inputs.
        meshes: made of the mesh before tensors are fake.
    """

    shape: tuple[int, ...]
    build: Callable[[Any], Built]
    meshes: Callable[[DeviceMesh], Any] = _itself


@dataclass(frozen=True)
class Traced:
    """One graph of a step.

    Attributes:
        program: read from ``module``, in the order as written.
        price: prices of the program, also with joined launches.
    """

    name: str
    program: Program
    module: fx.GraphModule
    hardware: Hardware

    @property
    def price(self) -> Callable[[Program], CostTable]:
        return prices_of(self.module.graph, self.hardware)

    def read(self) -> Program:
        """The program read anew, with nothing kept of a plan of it."""
        return read_program(self.module.graph, self.program.phase, name=self.program.name)


def prices_of(graph: fx.Graph, hardware: Hardware) -> Callable[[Program], CostTable]:
    """The cost model, told where the ranks of each communicator are."""
    return partial(price, hardware=hardware, ranks_per_node=_placed(graph, hardware.node.gpus))


def _placed(graph: fx.Graph, gpus: int) -> dict[str, int]:
    """Communicator, as a program names it → its members on each node."""
    names = dict.fromkeys(name for node in graph.nodes if (name := group_of(node)) is not None)
    return {f"g{number}": members_on_a_node(name, gpus) for number, name in enumerate(names)}


def members_on_a_node(group: str, gpus: int) -> int:
    """Ranks of a process group that share a node, where ranks fill nodes in order."""
    ranks = dist.get_process_group_ranks(_resolve_process_group(group))
    return max(Counter(rank // gpus for rank in ranks).values())


@contextmanager
def traced(name: str, model: Model, hardware: Hardware) -> Iterator[tuple[Traced, ...]]:
    """Forward and backward, named ``NAME_fw`` and ``NAME_bw``, while the process group that they are of exists."""
    dims = ("outer", "inner") if len(model.shape) == 2 else None  # fully_shard asks for names where there are two
    with fake_world(math.prod(model.shape)):
        meshes = model.meshes(init_device_mesh("cpu", model.shape, mesh_dim_names=dims))
        with FakeTensorMode(allow_non_fake_inputs=True):
            sharded, inputs = model.build(meshes)
            graphs = trace_graphs(make_traceable(sharded), inputs)
        named = {phase: f"{name}_{short}" for short, phase in PHASES.items()}
        yield tuple(Traced(named[program.phase], program, module, hardware) for program, module in graphs)


def experts_inside(mesh: DeviceMesh) -> Meshes:
    """Experts are spread over a node, and sharded over the nodes."""
    return Meshes(everyone=mesh["outer", "inner"]._flatten("everyone"), alike=mesh["outer"], experts=mesh["inner"])


def _llama(*shape: int) -> Model:
    return Model(shape, llama_step("llama3-8b", tokens=4096))


def _mixture(*shape: int) -> Model:
    return Model(shape, lambda meshes: mixture(DEEPSEEK_16B, meshes, tokens=8192), experts_inside)


MODELS: Mapping[str, Model] = {
    "llama3_8b_64": _llama(64),
    "llama3_8b_256": _llama(256),
    "llama3_8b_8x8": _llama(8, 8),
    "llama3_8b_32x8": _llama(32, 8),
    "moe_16b_8x8": _mixture(8, 8),
}
