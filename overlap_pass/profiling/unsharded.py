"""The same model without sharding: what its compute takes alone, which no schedule can beat where compute is the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import compat
from overlap_pass.fsdp.inspection import ParameterSpec, inspect

__all__ = ["compute_only"]


def compute_only(model: nn.Module) -> Callable[..., Any]:
    """Take ``fully_shard`` off a model in place, for good, and compile it with Inductor; returns what to call.

    Every rank then holds all parameters whole, in the dtype that they are computed with, and communicates nothing: the
    gradients are those of its own batch. Inputs of the model are cast as FSDP2 would.

    Raises:
        ConversionError: the model is not sharded, or tensor-parallel as well (its compute does communicate).
    """
    specs = inspect(model)
    for spec in specs:
        for parameter in spec.parameters:
            _register_whole(parameter)
        for module in spec.view.modules:
            before, after = compat.forward_hooks(spec.view.state, module)
            del module._forward_pre_hooks[before], module._forward_hooks[after]
            module._forward_hooks_always_called.pop(after, None)
            module.__class__ = compat.original_class(module)
            for managed in module.modules():
                for mapping, key in list(compat.fsdp_marks(managed)):
                    del mapping[key]
    model.compile(dynamic=False)
    input_dtype = specs[0].input_dtype

    def run(*inputs: Any, **named: Any) -> Any:
        return model(
            *(_cast(value, input_dtype) for value in inputs),
            **{name: _cast(value, input_dtype) for name, value in named.items()},
        )

    return run


def _register_whole(parameter: ParameterSpec) -> None:
    tensor = parameter.view.tensor
    if parameter.view.tensor_parallel is not None or not isinstance(tensor, DTensor):
        raise ConversionError(
            f"{parameter.gather.parameter}: is tensor-parallel too, so its compute cannot be had without communication: "
            "leave compute-only out"
        )
    with torch.no_grad():
        whole = nn.Parameter(
            tensor.full_tensor().to(parameter.gather.gather_dtype(tensor.dtype)), requires_grad=tensor.requires_grad
        )
    for module, name in parameter.view.owners:
        module._parameters[name] = whole


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if dtype is not None and isinstance(value, Tensor) and value.is_floating_point() else value
