"""The same three steps by the process group's own collectives: for reductions over slow links, and off CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import _coalescing_manager, _resolve_process_group

__all__ = ["finish_exchange", "start_exchange", "start_gather"]

_FUNCTIONAL = torch.ops._c10d_functional


def start_gather(shards: Sequence[Tensor], dtype: torch.dtype, group_name: str) -> list[Tensor]:
    """See :func:`overlap_pass.transport.copy_engine.start_gather`."""
    ranks = _resolve_process_group(group_name).size()
    return [_FUNCTIONAL.all_gather_into_tensor(shard.to(dtype), ranks, group_name) for shard in shards]


def start_exchange(gradients: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """Start sending each rank its rows; the tensors that the ranks' pieces land in, in the order of the ranks."""
    group = _resolve_process_group(group_name)
    if len(gradients) == 1 or not gradients[0].is_cuda:
        parts = [[gradient.shape[0] // group.size()] * group.size() for gradient in gradients]
        return [
            _FUNCTIONAL.all_to_all_single(gradient, rows, rows, group_name)
            for gradient, rows in zip(gradients, parts, strict=True)
        ]
    landed = [torch.empty_like(gradient) for gradient in gradients]
    with _coalescing_manager(group, gradients[0].device, async_ops=True) as together:
        for target, gradient in zip(landed, gradients, strict=True):
            dist.all_to_all_single(target, gradient, group=group)
    for target in landed:
        for work in together.works:
            _register_work(target, work)
    return landed


def finish_exchange(landed: Tensor, gradient: Tensor, mean: bool, dtype: torch.dtype, group_name: str) -> Tensor:
    """See :func:`overlap_pass.transport.copy_engine.finish_exchange`; ``gradient`` only lives until here."""
    landed = _FUNCTIONAL.wait_tensor(landed)
    ranks = _resolve_process_group(group_name).size()
    if landed.is_cuda:
        from overlap_pass.transport.kernels import sum_pieces

        own, *_ = pieces = landed.chunk(ranks)
        out = torch.empty(own.shape, dtype=dtype, device=own.device)
        sum_pieces(own, landed[pieces[0].shape[0] :], out, 1.0 / ranks if mean else 1.0, rank=0)
        return out
    first, *others = landed.chunk(ranks)
    total = first.float()
    for piece in others:
        total = total + piece.float()
    return (total / ranks if mean else total).to(dtype)
