"""Shapes of device meshes, as the command line takes them."""

from __future__ import annotations

from overlap_pass.errors import OptionError

__all__ = ["mesh_of"]


def mesh_of(text: str) -> tuple[int, ...]:
    """``"2x4"`` as numbers; none for no text.

    Raises:
        OptionError: no such shape.

    >>> mesh_of("2x4")
    (2, 4)
    """
    parts = text.split("x") if text else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise OptionError(f"--mesh={text!r} is no shape such as 2x4")
    return tuple(map(int, parts))
