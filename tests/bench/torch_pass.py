"""torch's own pass on a traced graph, with the prices of our cost model.

``schedule_overlap_bucketing`` is called as Inductor calls it, but for what needs a GPU or would use other prices:

- it is handed the price of every node (``custom_runtime_estimation``, milliseconds), the very numbers that our planner has. For
  a bucketed collective and the copies around it, the bucketed graph is read and priced as any other; what that takes is not
  counted. Fusion is in the prices already, so ``enable_fusion_regions`` stays off.
- *stand-ins*: memory is counted though tensors are on the CPU, attention on a CPU counts as compute as that on a GPU does, the
  roofline (which asks CUDA what it can do) is the same price, and the sizes of buckets are those for a Hopper GPU.

Its remedy for dependencies that go in a circle (``overlap_scheduling_autofix_cycles``) is on, without which it gives up on some
graphs. Garbage waits until the pass is done, as for ours.

On the backward of a model with replicas (HSDP) it does not end in torch 2.13, whatever its options: while it waits for a reduce-scatter that
is not hidden, it looks for an all-reduce to launch, which needs a later reduce-scatter of that group waited for first, and that
waits for those before it, the first one again. Python stops it with a ``RecursionError``.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch.fx as fx
from torch._inductor import comm_analysis, config
from torch._inductor.fx_passes import fsdp, overlap_scheduling
from torch._inductor.fx_passes.memory_estimator import MemoryTracker
from torch.utils.flop_counter import flop_registry

from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import Category, Program
from overlap_pass.graph.read import read_program
from overlap_pass.graph.targets import category, group_of
from overlap_pass.schedule.collection import collection_put_off
from tests.bench.traced import Traced, members_on_a_node, prices_of

__all__ = ["ORDER_ONLY", "Passed", "torch_pass"]

ORDER_ONLY: Mapping[str, Any] = {"collective_bucketing": False, "pre_bucketing_fsdp_collectives": False}
"""Launches stay as they are: without the second option, the pass buckets before it orders."""


@dataclass(frozen=True)
class Passed:
    """What the pass made of a graph.

    Attributes:
        program: the graph as the pass left it; for its order alone, the one as it came.
        order: of that program.
        planning_s: CPU seconds of the pass.
    """

    program: Program
    costs: CostTable
    order: tuple[str, ...]
    planning_s: float


def torch_pass(traced: Traced, options: Mapping[str, Any]) -> Passed:
    """Run the pass on a copy of the graph.

    Raises:
        RuntimeError: the pass failed; a ``RecursionError`` among others.
    """
    module = fx.GraphModule(traced.module, copy.deepcopy(traced.module.graph))
    prices = _Prices(traced, module)
    with _as_on_a_gpu(traced, prices), collection_put_off():
        began_s = time.process_time()
        overlap_scheduling.schedule_overlap_bucketing(
            module, custom_runtime_estimation=prices.of, compute_estimator="analytical", **options
        )
        planning_s = time.process_time() - began_s - prices.spent_s
    order = tuple(node.name for node in module.graph.nodes)
    if len(order) == len(traced.program.ops) and traced.program.index.keys() == set(order):
        return Passed(traced.program, traced.price(traced.program), order, planning_s)
    program, costs = _read(traced, module)
    return Passed(program, costs, program.order, planning_s)


def _read(traced: Traced, module: fx.GraphModule) -> tuple[Program, CostTable]:
    """The graph as the pass left it, or has it now; what its own operators do is known."""
    program = read_program(module.graph, traced.program.phase, name=traced.program.name, pure=("bucketing",))
    return program, prices_of(module.graph, traced.hardware)(program)


class _Prices:
    """What the pass asks for.

    Attributes:
        spent_s: CPU seconds of reading and pricing, which the pass is not charged for.
    """

    def __init__(self, traced: Traced, module: fx.GraphModule) -> None:
        self._traced, self._module = traced, module
        self._program, self._costs = traced.program, traced.price(traced.program)
        self.spent_s = 0.0

    def of(self, node: fx.Node, size_bytes: int | None = None) -> float:
        """Milliseconds of a node; of a collective of another size, where one is given."""
        if node.name not in self._costs.duration_us:  # the graph has been bucketed since
            began_s = time.process_time()
            self._program, self._costs = _read(self._traced, self._module)
            self.spent_s += time.process_time() - began_s
        if size_bytes is None:
            return self._costs.duration_us[node.name] / 1e3
        return self._resized_us(node, size_bytes) / 1e3

    def _resized_us(self, node: fx.Node, size_bytes: int) -> float:
        """The pass asks with no bytes at all, for what a further collective in a bucket saves."""
        collective = self._program.op(node.name).collective
        if collective is None:
            raise ValueError(f"{node.name} is no collective")
        members = members_on_a_node(group_of(node), self._traced.hardware.node.gpus)
        return collective_us(replace(collective, payload_bytes=size_bytes), self._traced.hardware, members)


@contextmanager
def _as_on_a_gpu(traced: Traced, prices: _Prices) -> Iterator[None]:
    """The stand-ins of this module's docstring."""
    attention = {
        node.target.overloadpacket: _no_formula
        for node in traced.module.graph.nodes
        if node.op == "call_function" and category(node.target) is Category.ATTENTION
    }
    everywhere = partial(MemoryTracker, device_filter=lambda device: True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(overlap_scheduling, "MemoryTracker", everywhere))
        stack.enter_context(mock.patch.object(overlap_scheduling, "estimate_roofline_runtime_ms", prices.of))
        stack.enter_context(
            mock.patch.object(comm_analysis, "get_gpu_type", return_value=comm_analysis.NVIDIA_GPU_TYPE.HOPPER)
        )
        stack.enter_context(mock.patch.dict(flop_registry, attention))
        stack.enter_context(mock.patch.object(fsdp.logger, "disabled", True))  # a line for each bucketing
        stack.enter_context(config.patch({"aten_distributed_optimizations.overlap_scheduling_autofix_cycles": True}))
        yield


def _no_formula(*_: Any, **__: Any) -> int:
    """Only whether an operator is in the registry is asked."""
    return 0
