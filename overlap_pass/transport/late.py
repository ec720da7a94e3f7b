"""Waits for the last reductions of a backward that a ``StepEdge`` may put off until some parameters are updated.

``wait_late`` stands where ``wait_tensor`` stood, in front of nothing but views and the return. It waits like that one, but inside
of :func:`putting_off`, where it only notes what is to be waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from overlap_pass.transport.ops import define

__all__ = ["WAIT_LATE", "finish", "putting_off"]

_FUNCTIONAL = torch.ops._c10d_functional

_put_off: list[list[Tensor]] = []
"""Not a context variable: backward runs on a thread of the autograd engine."""


@contextmanager
def putting_off() -> Iterator[list[Tensor]]:
    """Yields what is not waited for inside; all of it is where an error ends this."""
    pending: list[Tensor] = []
    _put_off.append(pending)
    try:
        yield pending
    except BaseException:
        finish(pending)
        raise
    finally:
        _put_off.pop()


def finish(pending: list[Tensor]) -> None:
    """Wait, in the order of the current stream."""
    while pending:
        _FUNCTIONAL.wait_tensor(pending.pop(0))


def _wait_late(tensor: Tensor) -> Tensor:
    if not _put_off:
        return _FUNCTIONAL.wait_tensor(tensor)  # type: ignore[no-any-return]
    _put_off[-1].append(tensor)
    return tensor


WAIT_LATE = define("wait_late(Tensor tensor) -> Tensor", _wait_late, lambda tensor: tensor)
