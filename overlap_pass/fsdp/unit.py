"""The run-time state of a converted model: which units are running, what their parameters read as, what is held back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from overlap_pass.fsdp.accumulation import GRADIENT, SHARD, Accumulator, Point
from overlap_pass.fsdp.compat import (
    TensorParallelView,
    after_backward,
    backward_running,
    may_compile,
    without_own_graph,
)
from overlap_pass.fsdp.doors import cast_floating, map_tensors
from overlap_pass.fsdp.gather import GatherSpec, gather, reduce_held

__all__ = ["ParameterRead", "Run", "Unit"]


class Run:
    """What the units of one model share.

    Attributes:
        forwards: how many forwards of units are running outside compiled graphs.
        units: all of them, in the order of the model.
    """

    __slots__ = ("forwards", "units", "watched")

    def __init__(self) -> None:
        self.forwards = 0
        self.units: list[Unit] = []
        self.watched = False

    def watch(self, output: Any) -> None:
        """Have what the coming backward leaves over reduced behind it, as FSDP2 does."""
        if torch.is_grad_enabled() and any(unit.accumulates for unit in self.units):
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._at_backward)

    def _at_backward(self, _: Tensor) -> None:
        if not self.watched:
            self.watched = True
            after_backward(self._reduce_leftovers)

    def _reduce_leftovers(self) -> None:
        self.watched = False
        for unit in self.units:
            unit.reduce_leftovers()


class Unit:
    """The run-time state of one ``fully_shard`` call.

    Attributes:
        fqn: qualified name of its module, ``""`` for the root.
        reshard: whether graphs gather again in backward (ZeRO-3).
        ahead: whether gathers may be launched before the graph that they stand in.
        reduces: whether a backward reduces its gradients; else they wait for one that does.
        all_reduces: whether it also reduces them over the replicas (HSDP).
        accumulates: whether any of the two was ever off: graphs look for gradients that wait from then on.
        depth: how many forwards of its modules are running outside compiled graphs.
        run: what it shares with the model's other units.
        owned: where its parameters are registered, each once, in FSDP2's order.
        gathered: parameters, by their key in ``owned``, while a forward outside of graphs computes with them.
    """

    __slots__ = (
        "__weakref__", "accumulates", "ahead", "all_reduces", "depth", "device", "fqn", "gathered", "input_dtype", "output_dtype",
        "owned", "reduces", "reshard", "run",
    )  # fmt: skip

    def __init__(
        self,
        fqn: str,
        *,
        reshard: bool,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        device: torch.device | None,
        run: Run | None = None,
    ) -> None:
        self.fqn = fqn
        self.run = run or Run()
        self.run.units.append(self)
        self.reshard = reshard
        self.reduces = self.all_reduces = True
        self.accumulates = self.ahead = False
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.device = device
        self.depth = 0
        self.owned: list[tuple[nn.Module, str, ParameterRead]] = []
        self.gathered: dict[str, Tensor] = {}

    # Hooks of the outermost module run outside its graph. They must not become small graphs of their own, without a
    # collective; and where forward cannot be compiled as a whole, their count lets its fragments read parameters.

    @without_own_graph
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Inside a graph nothing may be counted: Dynamo refuses side effects under activation checkpointing, and
        # is_compiling() already says what the count would.
        if not torch.compiler.is_compiling():
            self._enter(module)
        if self.device is not None or self.input_dtype is not None:
            args, kwargs = map_tensors(self._admit, args), map_tensors(self._admit, kwargs)
        return args, kwargs

    @without_own_graph
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            self._leave(output)
        return output if self.output_dtype is None else map_tensors(self._emit, output)

    # What register_fsdp_forward_method() has put on a module calls FSDP2's state by these names.
    _pre_forward = pre_forward
    _post_forward = post_forward

    @without_own_graph
    def _enter(self, module: nn.Module) -> None:
        self.depth += 1
        self.run.forwards += 1
        if self.depth == 1 and not may_compile(module.forward):
            self.gather_all()

    @without_own_graph
    def _leave(self, output: Any) -> None:
        self.depth = max(0, self.depth - 1)
        self.run.forwards = max(0, self.run.forwards - 1)
        if not self.depth:
            self.gathered.clear()
        if not self.run.forwards:
            self.run.watch(output)

    @without_own_graph
    def _admit(self, tensor: Tensor) -> Tensor:
        if self.device is not None and tensor.device != self.device:
            tensor = tensor.to(self.device)
        return cast_floating(tensor, self.input_dtype)

    @without_own_graph
    def _emit(self, tensor: Tensor) -> Tensor:
        return cast_floating(tensor, self.output_dtype)

    def running(self) -> bool:
        """Whether parameters read now are meant for computing: in a graph, in forward, or recomputed in backward."""
        return torch.compiler.is_compiling() or self.depth > 0 or backward_running()

    def in_forward(self) -> bool:
        """Whether a forward that began outside compiled graphs is running.

        Unlike :meth:`running`, not in whatever else a user compiles or hooks into backward: who walks over the parameters
        there, to clip their gradients for example, wants the shards.
        """
        return self.run.forwards > 0 if torch.compiler.is_compiling() else self.depth > 0

    @without_own_graph
    def gather_all(self) -> None:
        """Gather what the unit holds, in one order on every rank, for a forward that runs outside of graphs.

        Code that no compiler sees may read parameters as its data say (the experts that some token chose), on each rank
        in another order or not at all. Like FSDP2, it therefore finds all of them gathered.
        """
        for module, name, read in self.owned:
            parameter = module._parameters.get(name)
            if parameter is not None:
                self.gathered[read.key] = read.gather(parameter)

    # -- gradients that wait

    def set_reduction(self, *, reduces: bool | None = None, all_reduces: bool | None = None) -> None:
        """Whether coming backwards reduce; ``None`` leaves a flag as it is."""
        self.reduces = self.reduces if reduces is None else reduces
        self.all_reduces = self.all_reduces if all_reduces is None else all_reduces
        if self.reduces and self.all_reduces:
            return
        self.accumulates = True
        for module, name, read in self.owned:
            parameter = module._parameters.get(name)
            if parameter is not None:
                read.prepare(parameter)

    def reduce_leftovers(self) -> None:
        """Reduce what still waits although backward was to reduce: parameters that the last micro-batch did not use."""
        for module, name, read in self.owned:
            parameter = module._parameters.get(name)
            if parameter is not None and read.hold != GRADIENT and read.accumulator.sums:
                read.reduce_leftover(parameter)

    @property
    def pending(self) -> bool:
        """Whether gradients wait for a backward that reduces."""
        return any(read.accumulator.sums for _, _, read in self.owned)

    def clear(self) -> None:
        """Forget forwards that an exception has cut short, and gradients that wait."""
        self.depth = self.run.forwards = 0
        self.gathered.clear()
        for _, _, read in self.owned:
            read.accumulator.sums.clear()


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRead:
    """What reading a parameter takes.

    Attributes:
        unit: that it belongs to.
        key: its qualified name.
        how: its :class:`GatherSpec` as JSON.
        how_ahead: the same where its gather may be ahead.
        replicated: whether its gradient is all-reduced behind the reduce-scatter (HSDP).
        outer: the DTensor that the gathered parameter is part of, under tensor parallelism.
        accumulator: of gradients that wait.
    """

    unit: Unit
    key: str
    how: str
    how_ahead: str
    replicated: bool
    outer: TensorParallelView | None
    accumulator: Accumulator

    @property
    def hold(self) -> Point | None:
        """Where a backward that runs now holds the gradient back; ``None`` for nowhere."""
        if not self.unit.reduces:
            return GRADIENT
        return SHARD if self.replicated and not self.unit.all_reduces else None

    def read(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a parameter that is read inside its unit's forward."""
        unit = self.unit
        if torch.compiler.is_compiling() or not unit.depth:
            return self.gather(parameter)
        if self.key not in unit.gathered:
            unit.gather_all()
        return unit.gathered[self.key]

    def gather(self, parameter: nn.Parameter) -> Tensor:
        how = self.how_ahead if self.unit.ahead else self.how
        if self.unit.accumulates and parameter.requires_grad:
            hold = self.hold
            leaf = None if hold is None else self.accumulator.leaves[hold]
            full = gather(parameter, how, self.unit.reshard, self.accumulator.key, hold, leaf)
        else:
            full = gather(parameter, how, self.unit.reshard)
        if self.outer is None:
            return full
        mesh, placements = self.outer.mesh, self.outer.placements
        return DTensor.from_local(
            full, mesh, placements, run_check=False, shape=self.outer.shape, stride=self.outer.stride
        )

    def prepare(self, parameter: nn.Parameter) -> None:
        """Let gradients be held back where the flags say; told again when the model's dtype or device changes."""
        spec, hold = GatherSpec.from_json(self.how), self.hold
        if hold is None:
            return
        sum_dtype = spec.reduced_dtype(parameter.dtype)
        whole = hold == GRADIENT
        shape = spec.shape if whole else spec.reduced_shape
        dtype = spec.gather_dtype(parameter.dtype) if whole else sum_dtype
        # All elements are one, so that it takes no memory.
        like = torch.empty_strided(shape, [0] * len(shape), dtype=dtype, device=parameter.device)
        self.accumulator.prepare(hold, like, sum_dtype)

    def reduce_leftover(self, parameter: nn.Parameter) -> None:
        with torch.no_grad():
            shard = reduce_held(parameter, GatherSpec.from_json(self.how), self.accumulator, self.hold)
        if shard is not None:
            # Autograd's own way of adding to ``grad``, which also calls the hooks behind it.
            with torch.enable_grad():
                local = parameter.to_local(grad_placements=parameter.placements)
            torch.autograd.backward([local], [shard])
