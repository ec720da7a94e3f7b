"""What a converted module is: its parameters read as gathered tensors inside forward, as shards everywhere else."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp.compat import TensorParallelView, backward_running, without_own_graph
from overlap_pass.fsdp.gather import GatherSpec, gather
from overlap_pass.units import format_bytes

__all__ = [
    "READS",
    "UNIT",
    "Forwards",
    "OverlapModule",
    "ParameterRead",
    "Unit",
    "converted_class",
    "describe",
    "warn_always_reduced",
]

# Keys in the ``__dict__`` of converted modules: parameter name -> ParameterRead, and the module's own unit.
READS = "_overlap_reads"
UNIT = "_overlap_unit"


class Forwards:
    """How many forwards of one model's units are running outside compiled graphs."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Unit:
    """The run-time state of one ``fully_shard`` call.

    Attributes:
        fqn: qualified name of its module, ``""`` for the root.
        reshard: whether graphs gather again in backward (ZeRO-3).
        depth: how many forwards of its modules are running outside compiled graphs.
        forwards: the same count for all units of the model, which share it.
    """

    __slots__ = ("__weakref__", "depth", "device", "forwards", "fqn", "input_dtype", "output_dtype", "reshard")

    def __init__(
        self,
        fqn: str,
        *,
        reshard: bool,
        input_dtype: torch.dtype | None,
        output_dtype: torch.dtype | None,
        device: torch.device | None,
        forwards: Forwards | None = None,
    ) -> None:
        self.fqn = fqn
        self.forwards = forwards or Forwards()
        self.reshard = reshard
        self.input_dtype = input_dtype
        self.output_dtype = output_dtype
        self.device = device
        self.depth = 0

    # Hooks of the outermost module run outside its graph. They must not become small graphs of their own, without a
    # collective; and where forward cannot be compiled as a whole, their count lets its fragments read parameters.

    @without_own_graph
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # Inside a graph nothing may be counted: Dynamo refuses side effects under activation checkpointing, and
        # is_compiling() already says what the count would.
        if not torch.compiler.is_compiling():
            self.depth += 1
            self.forwards.count += 1
        if self.device is not None or self.input_dtype is not None:
            args, kwargs = _map_tensors(self._admit, args), _map_tensors(self._admit, kwargs)
        return args, kwargs

    @without_own_graph
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.depth = max(0, self.depth - 1)
            self.forwards.count = max(0, self.forwards.count - 1)
        return output if self.output_dtype is None else _map_tensors(self._emit, output)

    # What register_fsdp_forward_method() has put on a module calls FSDP2's state by these names.
    _pre_forward = pre_forward
    _post_forward = post_forward

    @without_own_graph
    def _admit(self, tensor: Tensor) -> Tensor:
        if self.device is not None and tensor.device != self.device:
            tensor = tensor.to(self.device)
        return _cast_floating(tensor, self.input_dtype)

    @without_own_graph
    def _emit(self, tensor: Tensor) -> Tensor:
        return _cast_floating(tensor, self.output_dtype)

    def running(self) -> bool:
        """Whether parameters read now are meant for computing: in a graph, in forward, or recomputed in backward."""
        return torch.compiler.is_compiling() or self.depth > 0 or backward_running()

    def in_forward(self) -> bool:
        """Whether a forward that began outside compiled graphs is running.

        Unlike :meth:`running`, not in whatever else a user compiles or hooks into backward: who walks over the parameters
        there, to clip their gradients for example, wants the shards.
        """
        return self.forwards.count > 0 if torch.compiler.is_compiling() else self.depth > 0


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterRead:
    """What reading a parameter takes: its unit, its :class:`GatherSpec` as JSON, and the DTensor that it is part of."""

    unit: Unit
    how: str
    outer: TensorParallelView | None


def _too_late(method: str) -> Callable[..., None]:
    def refuse(self: OverlapModule, *args: Any, **kwargs: Any) -> None:
        raise ConversionError(
            f"{method}() on {self.__dict__[UNIT].fqn or 'the root module'} comes too late: call "
            f"overlap_pass.restore(model), then {method}(), then overlap_pass.make_traceable(model)"
        )

    refuse.__name__ = method
    refuse.__doc__ = "Raises ConversionError: this is part of the graph, and has to be said before the conversion."
    return refuse


class OverlapModule:
    """Stands where ``FSDPModule`` stood among the bases of a converted module, with the same methods.

    What a method asked FSDP2's hooks to do at run time is now decided when the graph is scheduled, so most do nothing.
    What would change the numbers or the communication behind the schedule's back is refused.
    """

    __dict__: dict[str, Any]

    # -- decided by the schedule: nothing to do

    def unshard(self, async_op: bool = False) -> _Done | None:
        """Does nothing: the graph gathers."""
        return _Done() if async_op else None

    def reshard(self) -> None:
        """Does nothing: gathered parameters do not outlive the graph."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing: each backward waits for its own reductions."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Does nothing: gathered parameters do not outlive the graph."""

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Does nothing: the schedule prefetches."""

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Does nothing: the schedule prefetches."""

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Does nothing: every gather is asynchronous."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Does nothing: the backward graph gathers what it reads and no more."""

    def set_post_optim_event(self, event: Any) -> None:
        """Does nothing: gathers follow the optimizer on the current stream."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Does nothing: the schedule bounds what is in flight by the memory budget."""

    def reset_iter_state(self) -> None:
        """Forget forwards that an exception has cut short."""
        for unit in _units(self, recurse=True):
            unit.depth = unit.forwards.count = 0

    # -- kept, in the graph's terms

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether graphs compiled from now on gather again in backward; a compiled model is compiled again."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is True or False after conversion, not {reshard_after_forward!r}")
        for unit in _units(self, recurse=recurse):
            unit.reshard = reshard_after_forward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False`` warns once: gradients are reduced in every backward, and add up in their shards."""
        if not requires_gradient_sync:
            warn_always_reduced("set_requires_gradient_sync")

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """``False`` warns once: gradients are reduced in every backward, and add up in their shards."""
        if not requires_all_reduce:
            warn_always_reduced("set_requires_all_reduce")

    # -- part of the graph: to be said before the conversion

    set_gradient_divide_factor = _too_late("set_gradient_divide_factor")
    set_reduce_scatter_divide_factor = _too_late("set_reduce_scatter_divide_factor")
    set_force_sum_reduction_for_comms = _too_late("set_force_sum_reduction_for_comms")
    set_separate_reduce_scatter_group = _too_late("set_separate_reduce_scatter_group")
    set_reduce_scatter_unused_params = _too_late("set_reduce_scatter_unused_params")
    set_custom_all_gather = _too_late("set_custom_all_gather")
    set_custom_reduce_scatter = _too_late("set_custom_reduce_scatter")
    set_all_reduce_hook = _too_late("set_all_reduce_hook")
    set_allocate_memory_from_process_group_for_comm = _too_late("set_allocate_memory_from_process_group_for_comm")
    set_symm_mem_for_comm = _too_late("set_symm_mem_for_comm")

    # -- what Python and FSDP2's helpers ask of the module

    def _get_fsdp_state(self) -> Unit:
        return self.__dict__[UNIT]

    def extra_repr(self) -> str:
        unit: Unit = self.__dict__[UNIT]
        before = super().extra_repr()  # type: ignore[misc]
        backward = "gathered again in backward" if unit.reshard else "kept for backward"
        casts = [
            f"; {what} cast to {_name(dtype)}"
            for what, dtype in (("inputs", unit.input_dtype), ("outputs", unit.output_dtype))
            if dtype is not None
        ]
        what = f"overlap_pass: {describe(self, unit)}; {backward}{''.join(casts)}"
        return "\n".join(line for line in (before, what) if line)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConversionError(
            f"{type(self).__name__} cannot be deep-copied, as under FSDP2: copy its state_dict(), or copy before fully_shard()"
        )


class _Done:
    """The handle of an unshard that the graph will do."""

    def wait(self) -> None:
        """Returns at once."""


@functools.cache
def converted_class(original: type[nn.Module], names: tuple[str, ...], *, unit: bool) -> type[nn.Module]:
    """The class of converted modules that were ``original`` and hold the sharded parameters ``names``.

    Cached, and free of anything that belongs to one module, so that equal modules share a class and with it Dynamo's
    guards. A module that only holds parameters keeps its class name: code that looks at names goes on working.
    """
    members: dict[str, Any] = {name: property(_reader(name)) for name in names}
    members |= {"__module__": original.__module__, "__doc__": original.__doc__}
    members["named_parameters"] = _named_reader(original)
    if not unit:
        return type(original.__name__, (original,), {**members, "__qualname__": original.__qualname__})
    return type(f"Overlap{original.__name__}", (OverlapModule, original), members)


def _reader(name: str) -> Callable[[nn.Module], Tensor]:
    def read(module: nn.Module) -> Tensor:
        parameters = module._parameters
        if name not in parameters:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        parameter = parameters[name]
        own: ParameterRead = getattr(module, READS)[name]
        if parameter is None or not own.unit.running():
            return parameter
        full = gather(parameter, own.how, own.unit.reshard)
        if own.outer is None:
            return full
        mesh, placements = own.outer.mesh, own.outer.placements
        return DTensor.from_local(
            full, mesh, placements, run_check=False, shape=own.outer.shape, stride=own.outer.stride
        )

    return read


def _named_reader(original: type[nn.Module]) -> Callable[..., Iterator[tuple[str, Any]]]:
    """``named_parameters``, which ``parameters`` calls, with what the properties give inside forward.

    There code asks for ``next(self.parameters()).dtype``, and means the dtype to compute with.
    """

    def named_parameters(
        module: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        for name, parameter in original.named_parameters(module, prefix, recurse, remove_duplicate):
            path, _, attribute = name[len(prefix) :].lstrip(".").rpartition(".")
            owner = module.get_submodule(path)
            own: ParameterRead | None = getattr(owner, READS, {}).get(attribute)
            read = own is not None and own.unit.in_forward()
            yield name, getattr(owner, attribute) if read else parameter

    return named_parameters


def _units(module: Any, *, recurse: bool) -> list[Unit]:
    modules = module.modules() if recurse else (module,)
    return [found.__dict__[UNIT] for found in modules if UNIT in found.__dict__]


@functools.cache
def warn_always_reduced(method: str) -> None:
    """Say once per process that gradients cannot be held back."""
    warnings.warn(
        f"{method}(False) changes nothing on a model made traceable by overlap_pass: every backward reduces its gradients "
        "and adds them to the shards. The sum is the same up to rounding.",
        stacklevel=3,
    )


def describe(model: Any, unit: Unit | None = None) -> str:
    """The sharded parameters of a converted model, or of one unit in it, in a line.

    ``30 parameters, 24.0 KiB gathered as bfloat16 over 4 ranks (group 1) × 2 replicas, gradients reduced as float32``
    """
    # By name, since tied parameters are read at several places.
    found: dict[str, tuple[GatherSpec, torch.dtype]] = {}
    for module in model.modules():
        for name, read in module.__dict__.get(READS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and unit in (None, read.unit):
                spec = GatherSpec.from_json(read.how)
                found[spec.parameter] = spec, spec.gather_dtype(parameter.dtype)
    if not found:
        return "no parameters of its own"
    specs = [spec for spec, _ in found.values()]
    size = format_bytes(sum(torch.Size(spec.shape).numel() * dtype.itemsize for spec, dtype in found.values()))
    gathered = _joined(_name(dtype) for _, dtype in found.values())
    reduced = _joined(_name(spec.reduce_dtype or dtype) for spec, dtype in found.values())
    ranks = _joined(f"{spec.shard_ranks} ranks (group {spec.shard_group})" for spec in specs)
    replicas = _joined(f" × {spec.replicate_ranks} replicas" for spec in specs if spec.replicate_ranks > 1)
    return (
        f"{len(specs)} parameters, {size} gathered as {gathered} over {ranks}{replicas}, gradients reduced as {reduced}"
    )


def _joined(words: Iterable[str]) -> str:
    return "/".join(sorted(set(words)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@without_own_graph
def _cast_floating(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


@without_own_graph
def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply to every tensor inside containers, with the same idea of a container as FSDP2; anything else stays."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: _map_tensors(function, getattr(value, name)) for name in fields})
    if isinstance(value, OrderedDict):
        return type(value)((key, _map_tensors(function, item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_map_tensors(function, item) for item in value])
    if isinstance(value, (list, tuple, set)):
        return type(value)([_map_tensors(function, item) for item in value])
    return value
