"""What crosses the door of a unit: tensors inside any container, cast and moved as FSDP2 casts and moves them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from overlap_pass.fsdp.compat import without_own_graph

__all__ = ["cast_floating", "map_tensors"]


@without_own_graph
def cast_floating(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


@without_own_graph
def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply to every tensor inside containers, with the same idea of a container as FSDP2; anything else stays."""
    if isinstance(value, Tensor):
        return function(value)
    # Dynamo of torch 2.11 cannot ask whether the class of None is that of a dataclass.
    if value is None or isinstance(value, (PackedSequence, bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: map_tensors(function, getattr(value, name)) for name in fields})
    if isinstance(value, OrderedDict):
        return type(value)((key, map_tensors(function, item)) for key, item in value.items())
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, item) for item in value])
    if isinstance(value, (list, tuple, set)):
        return type(value)([map_tensors(function, item) for item in value])
    return value
