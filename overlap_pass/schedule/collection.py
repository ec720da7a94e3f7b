"""Planning without the garbage collector in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collection_put_off"]


@contextmanager
def collection_put_off() -> Iterator[None]:
    """Look for unreachable cycles when the block is over; also a decorator.

    Planning makes some hundred thousand small tuples that all stay until it is done. Their number makes the collector go through
    all of them, and the whole process, again and again: 10 to 25 % of the time, for nothing.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
