"""Gathers and reductions as operators that a graph can hold; importing this module defines them.

===================  ================================================================================================
``gather_start``     shard → the gathered tensor, to be waited for with ``_c10d_functional.wait_tensor``
``exchange_start``   gradient → a token, while each rank's rows are on their way to it
``exchange_finish``  token and gradient → this rank's rows of the sum; waits for them itself
===================  ================================================================================================

A start reads what it is given until its result is waited for: ``exchange_finish`` takes the gradient again so that a
compiler keeps it that long. ``by_copy`` asks for copy engines; tensors that are not on CUDA go by ordinary collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap_pass.transport import collectives
from overlap_pass.transport.total import Total

__all__ = ["EXCHANGE_FINISH", "EXCHANGE_START", "EXCHANGE_START_COALESCED", "GATHER_START", "GATHER_START_COALESCED"]

_library = torch.library.Library("overlap_pass", "FRAGMENT")


_emulated: dict[int, Tensor] = {}
"""Off CUDA: token address → what lands for it, so that graphs look as they do with copy engines."""


def _carrier(tensor: Tensor, by_copy: bool) -> Any:
    if not (by_copy and tensor.is_cuda):
        return collectives
    from overlap_pass.transport import copy_engine

    return copy_engine


def _gather(shard: Tensor, dtype: torch.dtype, group_size: int, group_name: str) -> Tensor:
    (gathered,) = _gather_all([shard], dtype, group_size, group_name)
    return gathered


def _gather_all(shards: Sequence[Tensor], dtype: torch.dtype, group_size: int, group_name: str) -> list[Tensor]:
    found: list[Tensor] = _carrier(shards[0], True).start_gather([s.contiguous() for s in shards], dtype, group_name)
    return found


def _exchange(gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool) -> Tensor:
    (token,) = _exchange_all([gradient], total, group_size, group_name, by_copy)
    return token


def _exchange_all(
    gradients: Sequence[Tensor], total: str, group_size: int, group_name: str, by_copy: bool
) -> list[Tensor]:
    found: list[Tensor] = _carrier(gradients[0], by_copy).start_exchange(gradients, Total.parse(total), group_name)
    if not by_copy or gradients[0].is_cuda:
        return found
    tokens = [gradient.new_empty(1) for gradient in gradients]
    _emulated.update(zip((token.data_ptr() for token in tokens), found, strict=True))
    return tokens


def _finish(token: Tensor, gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool) -> Tensor:
    token = _emulated.pop(token.data_ptr(), token)
    found: Tensor = _carrier(gradient, by_copy).finish_exchange(token, gradient, Total.parse(total), group_name)
    return found


def _gather_shape(shard: Tensor, dtype: torch.dtype, group_size: int, group_name: str) -> Tensor:
    return shard.new_empty((shard.shape[0] * group_size, *shard.shape[1:]), dtype=dtype)


def _gather_shapes(shards: Sequence[Tensor], dtype: torch.dtype, group_size: int, group_name: str) -> list[Tensor]:
    return [_gather_shape(shard, dtype, group_size, group_name) for shard in shards]


def _token(gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool) -> Tensor:
    return gradient.new_empty(1) if by_copy else torch.empty_like(gradient)


def _tokens(gradients: Sequence[Tensor], total: str, group_size: int, group_name: str, by_copy: bool) -> list[Tensor]:
    return [_token(gradient, total, group_size, group_name, by_copy) for gradient in gradients]


def _rows(token: Tensor, gradient: Tensor, total: str, group_size: int, group_name: str, by_copy: bool) -> Tensor:
    return gradient.new_empty((gradient.shape[0] // group_size, *gradient.shape[1:]), dtype=Total.parse(total).dtype)


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    # Tickets count launches on the host: a recorded CUDA graph would repeat the same ones.
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.cudagraph_unsafe, torch.Tag.needs_contiguous_strides))
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    _library.impl(name, shape, "Meta")
    return getattr(torch.ops.overlap_pass, name).default


_GATHER = "ScalarType dtype, int group_size, str group_name"
_TOTAL = "str total, int group_size, str group_name, bool by_copy"
GATHER_START = _define(f"gather_start(Tensor shard, {_GATHER}) -> Tensor", _gather, _gather_shape)
GATHER_START_COALESCED = _define(
    f"gather_start_coalesced(Tensor[] shards, {_GATHER}) -> Tensor[]", _gather_all, _gather_shapes
)
EXCHANGE_START = _define(f"exchange_start(Tensor gradient, {_TOTAL}) -> Tensor", _exchange, _token)
EXCHANGE_START_COALESCED = _define(
    f"exchange_start_coalesced(Tensor[] gradients, {_TOTAL}) -> Tensor[]", _exchange_all, _tokens
)
EXCHANGE_FINISH = _define(f"exchange_finish(Tensor token, Tensor gradient, {_TOTAL}) -> Tensor", _finish, _rows)
