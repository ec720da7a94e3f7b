"""The two kernels around a copy engine: cast into two places at once, and sum what the ranks sent.

Both are bound by memory. Reading once and writing twice saves a pass over the shard, which is what makes gathering by copy
engine need no copy into or out of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["cast_to_both", "sum_pieces"]

_BLOCK = 4096
_SMALL_BYTES = 1 << 20


@triton.jit
def _cast_to_both(source, first, second, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(source + at, mask=inside).to(first.dtype.element_ty)
    tl.store(first + at, value, mask=inside)
    tl.store(second + at, value, mask=inside)


@triton.jit
def _sum_pieces(own, landed, out, scale, count, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros([BLOCK], dtype=tl.float32)
    beside = at
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            piece = tl.load(own + at, mask=inside).to(tl.float32)
        else:
            piece = tl.load(landed + beside, mask=inside).to(tl.float32)
            beside += count
        if rank == 0:
            total = piece
        else:
            total += piece
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)


def cast_to_both(sources: Sequence[Tensor], firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> None:
    """Write each source, cast, to two contiguous places of as many elements.

    Small ones go together in one launch of torch's: reading them twice costs less than launching for each.
    """
    small = [i for i, source in enumerate(sources) if source.nbytes < _SMALL_BYTES]
    if small:
        torch._foreach_copy_(
            [firsts[i] for i in small] + [seconds[i] for i in small], [sources[i].view(-1) for i in small] * 2
        )
    for source, first, second in zip(sources, firsts, seconds, strict=True):
        if source.nbytes >= _SMALL_BYTES:
            count = source.numel()
            _cast_to_both[(triton.cdiv(count, _BLOCK),)](source, first, second, count, BLOCK=_BLOCK)


def sum_pieces(own: Tensor, landed: Tensor, out: Tensor, scale: float, rank: int) -> None:
    """``out = scale * sum of the ranks' pieces``, added in float32 in the order of the ranks.

    Args:
        own: this rank's piece, contiguous.
        landed: the others' pieces, one after the other in the order of their ranks, ``[ranks - 1, own.numel()]``.
        out: as many elements as ``own``, contiguous.
    """
    count = own.numel()
    ranks = landed.numel() // max(count, 1) + 1
    _sum_pieces[(triton.cdiv(count, _BLOCK),)](own, landed, out, scale, count, RANK=rank, RANKS=ranks, BLOCK=_BLOCK)
