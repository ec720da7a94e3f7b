"""Inductor's lowerings of our operators, where its own would let memory go too early.

A gradient is read from the start of an exchange until its end, so both name it. Inductor gives each reader a buffer of its
own where the gradient is the result of a fused kernel, and uses the first one's memory again right behind the start,
while the gradient is still being sent. Realized once, before the start, it is one buffer that lives as long as it must.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering

from overlap_pass.transport import ops
from overlap_pass.transport.late import WAIT_LATE

__all__: list[str] = []


def _realized(gradient: Any) -> Any:
    """The gradient in memory, rows one after the other; the same buffer for all who ask later."""
    gradient.realize()
    return ir.ExternKernel.require_contiguous_strides(gradient)


def _started(operator: Any) -> Callable[..., Any]:
    start = fallback_handler(operator)

    def lower(sent: Any, *how: Any) -> Any:
        return start([_realized(one) for one in sent] if isinstance(sent, (list, tuple)) else _realized(sent), *how)

    return lower


for _operator in (ops.EXCHANGE_START, ops.EXCHANGE_START_COALESCED):
    register_lowering(_operator, type_promotion_kind=None)(_started(_operator))


@register_lowering(WAIT_LATE, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _wait_late(tensor: Any) -> Any:
    """As Inductor's own of ``wait_tensor``: in place, so that what the collective reads and writes lives until then."""
    ir._WaitKernel.create_wait(WAIT_LATE, tensor)
    return tensor
