"""The two kernels around a copy engine: cast into two places at once, and sum what the ranks sent.

Both are bound by memory. Reading once and writing twice saves a pass over the shard, which is what makes gathering by copy
engine need no copy into or out of a buffer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Place", "cast_to_both", "sum_pieces"]

Place = tuple[Tensor, int]
"""A tensor and an offset in elements: cheaper than a slice, which the host would have to make for each call."""

_BLOCK = 4096


@triton.jit
def _cast_to_both(source, first, first_at, second, second_at, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(source + at, mask=inside).to(first.dtype.element_ty)
    tl.store(first + first_at + at, value, mask=inside)
    tl.store(second + second_at + at, value, mask=inside)


@triton.jit
def _sum_pieces(  # type: ignore[no-untyped-def]
    sent, landed, landed_at, out, scale, count, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    own = at
    beside = at + landed_at
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for rank in tl.static_range(RANKS):
        if rank == RANK:
            piece = tl.load(sent + own, mask=inside).to(tl.float32)
        else:
            piece = tl.load(landed + beside, mask=inside).to(tl.float32)
            beside += count
        own += count
        if rank == 0:
            total = piece
        else:
            total += piece
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), mask=inside)


def cast_to_both(source: Tensor, first: Place, second: Place) -> None:
    """Write a contiguous source, cast, to two places; both tensors have the dtype that it is cast to."""
    count = source.numel()
    grid = (-(-count // _BLOCK),)
    _cast_to_both[grid](source, *first, *second, count, BLOCK=_BLOCK)


def sum_pieces(sent: Tensor, landed: Place, out: Tensor, scale: float, rank: tuple[int, int]) -> None:
    """``out = scale * sum of the ranks' pieces``, added in float32 in the order of the ranks.

    Args:
        sent: this rank's gradient, contiguous: a piece for each rank.
        landed: the others' pieces for this rank, one after the other in the order of their ranks.
        out: one piece, contiguous.
        rank: this rank, and how many there are.
    """
    count = out.numel()
    grid = (-(-count // _BLOCK),)
    _sum_pieces[grid](sent, *landed, out, scale, count, RANK=rank[0], RANKS=rank[1], BLOCK=_BLOCK)
