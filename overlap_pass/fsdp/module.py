"""What a converted module is: its parameters read as gathered tensors inside forward, as shards everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp.gather import GatherSpec
from overlap_pass.fsdp.summary import summary
from overlap_pass.fsdp.unit import ParameterRead, Unit

__all__ = ["READS", "UNIT", "OverlapModule", "converted_class", "describe"]

# Keys in the ``__dict__`` of converted modules: parameter name -> ParameterRead, and the module's own unit.
READS = "_overlap_reads"
UNIT = "_overlap_unit"


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
        """Forget forwards that an exception has cut short, and gradients that wait for a reduction, as FSDP2 does."""
        for unit in _units(self, recurse=True):
            unit.clear()

    # -- kept, in the graph's terms

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether graphs compiled from now on gather again in backward; a compiled model is compiled again."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is True or False after conversion, not {reshard_after_forward!r}")
        for unit in _units(self, recurse=recurse):
            unit.reshard = reshard_after_forward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """``False``: the backward of forwards from now on reduces nothing; the next one that does reduces the sum."""
        for unit in _units(self, recurse=recurse):
            unit.set_reduction(reduces=requires_gradient_sync, all_reduces=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """``False``: the same for the all-reduce over replicas alone (HSDP)."""
        for unit in _units(self, recurse=recurse):
            unit.set_reduction(all_reduces=requires_all_reduce)

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
            f"; {what} cast to {str(dtype).removeprefix('torch.')}"
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
        return own.read(parameter)

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


def describe(model: Any, unit: Unit | None = None) -> str:
    """The sharded parameters of a converted model, or of one unit in it, in a line: see ``fsdp.summary``."""
    found: dict[GatherSpec, torch.dtype] = {}  # a tied parameter is read at several places
    for module in model.modules():
        for name, read in module.__dict__.get(READS, {}).items():
            parameter = module._parameters.get(name)
            if parameter is not None and unit in (None, read.unit):
                found[GatherSpec.from_json(read.how)] = parameter.dtype
    return summary(found)
