"""What this process runs on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from overlap_pass.cost.hardware import Hardware, load_hardware

__all__ = ["detect_hardware", "is_first_rank"]

_FALLBACK = "h100"
_BY_DEVICE_NAME = ("h200", "h100", "a100")


def detect_hardware(name: str) -> Hardware:
    """The hardware file of that name or path; ``"auto"`` goes by the CUDA device's name, else by ``h100``.

    Every rank must get the same answer: only the device's name counts, never a measurement.
    """
    if name != "auto":
        return load_hardware(name)
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name().lower()
        for known in _BY_DEVICE_NAME:
            if known in device:
                return load_hardware(known)
    return load_hardware(_FALLBACK)


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
