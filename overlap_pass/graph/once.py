"""Keeping what has been made of something that never changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["keep", "once"]

_From = TypeVar("_From")
_Made = TypeVar("_Made")


def once(source: _From, make: Callable[[_From], _Made]) -> _Made:
    """What ``make`` makes of a frozen object; made at the first call and kept with it, as a cached property would.

    Args:
        source: an instance of a frozen dataclass without slots.
        make: the same function at every call (a lambda is another one each time).
    """
    kept: dict[Callable[..., Any], Any] = vars(source).setdefault("_made_of_it", {})
    if make not in kept:
        kept[make] = make(source)
    found: _Made = kept[make]
    return found


def keep(source: _From, make: Callable[[_From], _Made], made: _Made) -> None:
    """Let :func:`once` answer with what was made in another, shorter way; the same that ``make`` would make."""
    vars(source).setdefault("_made_of_it", {})[make] = made
