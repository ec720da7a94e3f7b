"""The two kernels around a copy engine: cast into two places at once, and sum what the ranks sent.

Both are bound by memory. Reading once and writing twice saves a pass over the shard, which is what makes gathering by copy
engine need no copy into or out of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from overlap_pass.memory.places import ALIGNMENT

__all__ = ["Place", "cast_to_both", "sum_pieces"]

Place = tuple[Tensor, int]
"""A tensor and an offset in elements: cheaper than a slice, which the host would have to make for each call."""

_BLOCK = 4096

_AT_ONCE = 8
"""Shards that one kernel casts: a launch of the parameters of a layer is one or two kernels, not seven to nine."""


@triton.jit(do_not_specialize=["unit"])
def _cast_to_both(  # type: ignore[no-untyped-def]
    shards, results, counts, staged, staging, unit, RANK: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    unit = unit.to(tl.int64)
    for number in tl.static_range(len(shards)):
        count = counts[number]
        blocks = tl.cdiv(count, BLOCK)
        if (block >= 0) & (block < blocks):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < count
            value = tl.load(shards[number] + at, mask=inside).to(staging.dtype.element_ty)
            tl.store(staging + unit * UNIT + at, value, mask=at < staged[number])
            tl.store(results[number] + RANK * count.to(tl.int64) + at, value, mask=inside)
        block -= blocks
        unit += tl.cdiv(staged[number], UNIT)


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


def cast_to_both(
    shards: Sequence[Tensor], results: Sequence[Tensor], rank: int, staging: Place, final: int = 0
) -> None:
    """Write contiguous shards, cast, to both places where they are needed; to one where that is the same.

    Args:
        shards: this rank's rows of each parameter.
        results: the gathered parameters, contiguous; this rank's rows are filled.
        staging: where the shards go one after the other, as :func:`~overlap_pass.memory.places.laid_out` has them, in the
            dtype of the results; its offset is a multiple of the alignment.
        final: bit by bit, which of them need not, as the peers fetch the result's rows themselves.
    """
    staged, offset = staging
    unit_elements = ALIGNMENT // staged.itemsize
    unit = offset // unit_elements
    for start in range(0, len(shards), _AT_ONCE):
        sources, targets = shards[start : start + _AT_ONCE], results[start : start + _AT_ONCE]
        counts = tuple(shard.numel() for shard in sources)
        staged_counts = tuple(0 if final >> start + number & 1 else count for number, count in enumerate(counts))
        # Two variants of the kernel, for one and for several; what is missing to several is repeated without elements.
        missing = 0 if len(sources) == 1 else _AT_ONCE - len(sources)
        _cast_to_both[(sum(-(-count // _BLOCK) for count in counts),)](
            (*sources, *sources[:1] * missing),
            (*targets, *targets[:1] * missing),
            (*counts, *[0] * missing),
            (*staged_counts, *[0] * missing),
            staged,
            unit,
            RANK=rank,
            UNIT=unit_elements,
            BLOCK=_BLOCK,
        )
        unit += sum(-(-count // unit_elements) for count in staged_counts)


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
