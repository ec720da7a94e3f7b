"""What the ranks' gradients become."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Total"]


@dataclass(frozen=True, slots=True)
class Total:
    """How the ranks' pieces are added: in float32, in the order of the ranks.

    Attributes:
        mean: the sum is divided by the number of ranks.
        dtype: what the result is rounded to.
    """

    mean: bool
    dtype: torch.dtype

    def factor(self, ranks: int) -> float:
        return 1.0 / ranks if self.mean else 1.0
