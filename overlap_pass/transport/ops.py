"""Gathers and reductions as operators that a graph can hold; importing this module defines them.

===================  ================================================================================================
``gather_start``     shard → the gathered tensor, to be waited for with ``_c10d_functional.wait_tensor``
``exchange_start``   gradient → a token, while each rank's rows are on their way to it
``exchange_finish``  token and gradient → this rank's rows of the sum; waits for them itself
===================  ================================================================================================

A start reads what it is given until its result is waited for: ``exchange_finish`` takes the gradient again so that a
compiler keeps it that long. ``by_copy`` asks for copy engines; tensors that are not on CUDA go by ordinary collectives.
``place`` is :class:`~overlap_pass.memory.places.Place` in numbers, which a graph gets when its order is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap_pass.memory.places import Place
from overlap_pass.transport import collectives
from overlap_pass.transport.total import Total

__all__ = [
    "EXCHANGE_FINISH",
    "EXCHANGE_START",
    "EXCHANGE_START_COALESCED",
    "GATHER_START",
    "GATHER_START_COALESCED",
    "define",
]

_library = torch.library.Library("overlap_pass", "FRAGMENT")


_emulated: dict[int, Tensor] = {}
"""Off CUDA: token address → what lands for it, so that graphs look as they do with copy engines."""


def _copies(tensor: Tensor, by_copy: bool) -> Any:
    """The module of copy engines, where they carry what is asked for."""
    if not (by_copy and tensor.is_cuda):
        return None
    from overlap_pass.transport import copy_engine

    return copy_engine


def _gather(shard: Tensor, dtype: torch.dtype, group_size: int, group_name: str, place: list[int]) -> Tensor:
    (gathered,) = _gather_all([shard], dtype, group_size, group_name, place)
    return gathered


def _gather_all(
    shards: Sequence[Tensor], dtype: torch.dtype, group_size: int, group_name: str, place: list[int]
) -> list[Tensor]:
    shards = [shard.contiguous() for shard in shards]
    copies = _copies(shards[0], True)
    if copies is None:
        return collectives.start_gather(shards, dtype, group_name, Place.of(*place) if place else None)
    gathered: list[Tensor] = copies.start_gather(shards, dtype, group_name, Place.of(*place))
    return gathered


def _exchange(
    gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool, place: list[int]
) -> Tensor:
    (token,) = _exchange_all([gradient], total, group_size, group_name, by_copy, place)
    return token


def _exchange_all(
    gradients: Sequence[Tensor], total: str, group_size: int, group_name: str, by_copy: bool, place: list[int]
) -> list[Tensor]:
    copies = _copies(gradients[0], by_copy)
    if copies is not None:
        sent: list[Tensor] = copies.start_exchange(gradients, Total.parse(total), group_name, Place.of(*place))
        return sent
    landed = collectives.start_exchange(gradients, Total.parse(total), group_name)
    if not by_copy:
        return landed
    tokens = [gradient.new_empty(1) for gradient in gradients]
    _emulated.update(zip((token.data_ptr() for token in tokens), landed, strict=True))
    return tokens


def _finish(token: Tensor, gradient: Tensor, *how: Any) -> Tensor:
    total, _, group_name, by_copy, place = how
    copies = _copies(gradient, by_copy)
    if copies is not None:
        summed: Tensor = copies.finish_exchange(gradient, Total.parse(total), group_name, Place.of(*place))
        return summed
    landed = _emulated.pop(token.data_ptr(), token)
    return collectives.finish_exchange(landed, gradient, Total.parse(total), group_name)


def _gather_shape(shard: Tensor, dtype: torch.dtype, group_size: int, group_name: str, place: list[int]) -> Tensor:
    return collectives.empty_gathered(shard, dtype, group_size)


def _gather_shapes(shards: Sequence[Tensor], *how: Any) -> list[Tensor]:
    return [_gather_shape(shard, *how) for shard in shards]


def _token(gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool, place: list[int]) -> Tensor:
    return gradient.new_empty(1) if by_copy else torch.empty_like(gradient)


def _tokens(gradients: Sequence[Tensor], *how: Any) -> list[Tensor]:
    return [_token(gradient, *how) for gradient in gradients]


def _rows(token: Tensor, gradient: Tensor, *how: Any) -> Tensor:
    total, group_size, *_ = how
    return gradient.new_empty((gradient.shape[0] // group_size, *gradient.shape[1:]), dtype=Total.parse(total).dtype)


def define(schema: str, run: Callable[..., Any], shape: Callable[..., Any], *tags: torch.Tag) -> Any:
    """The operator ``overlap_pass::…`` of a schema: ``run`` on CPU and CUDA, ``shape`` where nothing is computed."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, shape, "Meta")
    return getattr(torch.ops.overlap_pass, name).default


_GATHER = "ScalarType dtype, int group_size, str group_name, int[] place"
_TOTAL = "str total, int group_size, str group_name, bool by_copy, int[] place"
_CONTIGUOUS = torch.Tag.needs_contiguous_strides
GATHER_START = define(f"gather_start(Tensor shard, {_GATHER}) -> Tensor", _gather, _gather_shape, _CONTIGUOUS)
GATHER_START_COALESCED = define(
    f"gather_start_coalesced(Tensor[] shards, {_GATHER}) -> Tensor[]", _gather_all, _gather_shapes, _CONTIGUOUS
)
# What an exchange starts with has to be one buffer until its end: ``compile_backends.lowerings`` sees to it.
EXCHANGE_START = define(f"exchange_start(Tensor gradient, {_TOTAL}) -> Tensor", _exchange, _token)
EXCHANGE_START_COALESCED = define(
    f"exchange_start_coalesced(Tensor[] gradients, {_TOTAL}) -> Tensor[]", _exchange_all, _tokens
)
EXCHANGE_FINISH = define(
    f"exchange_finish(Tensor token, Tensor gradient, {_TOTAL}) -> Tensor", _finish, _rows, _CONTIGUOUS
)
