"""What the ranks' gradients become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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

    @property
    def spec(self) -> str:
        """The text that :meth:`parse` reads, for an operator's argument: ``"avg float32"``."""
        return f"{'avg' if self.mean else 'sum'} {str(self.dtype).removeprefix('torch.')}"

    @staticmethod
    @cache
    def parse(text: str) -> Total:
        reduce_op, dtype = text.split()
        return Total(reduce_op == "avg", getattr(torch, dtype))

    def factor(self, ranks: int) -> float:
        return 1.0 / ranks if self.mean else 1.0
