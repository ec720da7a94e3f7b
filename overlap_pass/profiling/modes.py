"""``torch.compile``'s modes, as Inductor's settings."""

from __future__ import annotations

from typing import Any

import torch

from overlap_pass.cost.hardware import Hardware
from overlap_pass.errors import OptionError

__all__ = ["launching", "mode_patches"]


def mode_patches(mode: str) -> dict[str, Any]:
    """Inductor's settings for a mode.

    Raises:
        OptionError: the mode is unknown.
    """
    if mode == "default":
        return {}
    known = torch._inductor.list_mode_options()
    if mode not in known:
        raise OptionError(f"mode={mode!r} is unknown; torch.compile's modes are {', '.join(sorted(known))}")
    return dict(known[mode])


def launching(hardware: Hardware, mode: str) -> Hardware:
    """The machine as a mode launches on it: one that records CUDA graphs has the host launch a whole graph at once.

    Raises:
        OptionError: the mode is unknown.
    """
    return hardware.replaying() if mode_patches(mode).get("triton.cudagraphs") else hardware
