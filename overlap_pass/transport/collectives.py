"""The same three steps by the process group's own collectives: for reductions over slow links, and off CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.memory.places import Place, laid_out
from overlap_pass.transport.final import Final
from overlap_pass.transport.total import Total

__all__ = ["empty_gathered", "finish_exchange", "start_exchange", "start_gather"]

_FUNCTIONAL = torch.ops._c10d_functional


def empty_gathered(shard: Tensor, dtype: torch.dtype, ranks: int) -> Tensor:
    """What holds the rows of all ranks."""
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]), dtype=dtype)


def start_gather(
    shards: Sequence[Tensor], dtype: torch.dtype, group_name: str, place: Place | None = None
) -> list[Tensor]:
    """See :func:`overlap_pass.transport.copy_engine.start_gather`. A place is needed only for results that lie there themselves,
    off CUDA in memory of this rank alone."""
    ranks = _resolve_process_group(group_name).size()
    start = _FUNCTIONAL.all_gather_into_tensor_out
    results = [empty_gathered(shard, dtype, ranks) for shard in shards]
    if place is not None and place.final:
        sizes = tuple(shard.numel() * dtype.itemsize for shard in shards)
        starts, _ = laid_out(sizes, place.final, ranks)
        memory = _imagined(group_name, place.capacity_bytes)
        for number in filter(place.is_final, range(len(shards))):
            results[number] = memory.at(place.offset + starts[number], results[number].shape, dtype)
    return [
        start(shard.to(dtype), ranks, group_name, out=result) for shard, result in zip(shards, results, strict=True)
    ]


@cache
def _imagined(group_name: str, capacity_bytes: int) -> Final:
    """What stands for the memory that ranks share."""
    return Final(torch.empty(capacity_bytes, dtype=torch.uint8))


def start_exchange(gradients: Sequence[Tensor], total: Total, group_name: str) -> list[Tensor]:
    """Start sending each rank its rows; the tensors that the ranks' pieces land in, in the order of the ranks."""
    ranks = _resolve_process_group(group_name).size()
    rows = [[gradient.shape[0] // ranks] * ranks for gradient in gradients]
    return [
        _FUNCTIONAL.all_to_all_single(gradient, each, each, group_name)
        for gradient, each in zip(gradients, rows, strict=True)
    ]


def finish_exchange(landed: Tensor, gradient: Tensor, total: Total, group_name: str) -> Tensor:
    """See :func:`overlap_pass.transport.copy_engine.finish_exchange`; ``gradient`` only lives until here."""
    landed = _FUNCTIONAL.wait_tensor(landed)
    ranks = _resolve_process_group(group_name).size()
    first, *others = landed.chunk(ranks)
    if landed.is_cuda:
        from overlap_pass.transport.kernels import sum_pieces

        out = torch.empty(first.shape, dtype=total.dtype, device=first.device)
        sum_pieces(landed, (landed, first.numel()), out, total.factor(ranks), (0, ranks))
        return out
    added = first.float()
    for piece in others:
        added = added + piece.float()
    return (added * total.factor(ranks)).to(total.dtype)
