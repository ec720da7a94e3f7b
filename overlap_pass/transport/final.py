"""Gathered parameters that lie in memory which the ranks share, where their peers fetch this rank's part from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

__all__ = ["Final"]


class Final:
    """Tensors in one piece of memory.

    Each has a storage of its own: what a tensor waits for is kept by its storage, and in a common one all would wait for each
    other's gathers.
    """

    def __init__(self, memory: Tensor) -> None:
        """``memory`` as bytes."""
        self._memory = memory
        self._made: dict[tuple[int, tuple[int, ...], torch.dtype], Tensor] = {}

    def at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The contiguous tensor that begins at a byte."""
        found = self._made.get(key := (offset, tuple(shape), dtype))
        if found is None:
            size_bytes = torch.Size(shape).numel() * dtype.itemsize
            own = self._memory[offset : offset + size_bytes].view(dtype).view(key[1])
            found = self._made[key] = from_dlpack(to_dlpack(own))
        return found.detach()  # whoever gets it may note on it what belongs to one run
