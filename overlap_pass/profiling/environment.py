"""What this process runs on."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["device_name", "is_first_rank"]


def device_name() -> str | None:
    """Name of this process's CUDA device, ``None`` without one. Costs go by it, never by a measurement of this rank."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
