"""``torch.compile``'s modes, as Inductor's settings."""

from __future__ import annotations

from typing import Any

import torch

from overlap_pass.errors import OptionError

__all__ = ["mode_patches", "records_graphs"]


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


def records_graphs(mode: str) -> bool:
    """Whether a mode records CUDA graphs, so that the host launches a whole forward or backward at once."""
    return bool(mode_patches(mode).get("triton.cudagraphs"))
