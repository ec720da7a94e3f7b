"""Inductor's lowerings of our operators, where its own would let memory go too early, or use it again.

A gradient is read from the start of an exchange until its end, so both name it. Inductor gives each reader a buffer of its
own where the gradient is the result of a fused kernel, and uses the first one's memory again right behind the start,
while the gradient is still being sent. Realized once, before the start, it is one buffer that lives as long as it must.

A gathered parameter that lies in memory which the ranks share is no buffer of Inductor's to use again. What is gathered there
next is a write to it: so Inductor knows that all which reads it comes before, whatever it fuses and wherever it puts that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from overlap_pass.memory.places import Place
from overlap_pass.rewrite.places import DISPLACED
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


def _gathered(operator: Any) -> Callable[..., Any]:
    start = fallback_handler(operator)

    def lower(sent: Any, dtype: Any, group_size: Any, group_name: Any, place: Any) -> Any:
        results = start(sent, dtype, group_size, group_name, place)
        if place:
            _note_final(list(results) if isinstance(results, (list, tuple)) else [results], Place.of(*place))
        return results

    return lower


def _note_final(results: list[Any], place: Place) -> None:
    """Results that lie in shared memory are never used again for another, and those that lay there are written to."""
    node = V.graph.current_node
    final = [result for number, result in enumerate(results) if place.is_final(number)]
    V.graph.never_reuse_buffers.update(result.get_name() for result in final)
    known: dict[str, list[Any]] = vars(V.graph).setdefault("overlap_pass_final", {})
    known[node.name] = final
    launch = results[0].data.data.inputs[0]
    for displaced in node.meta.get(DISPLACED, ()):
        for one in known[displaced]:
            launch.mutation_outputs.append(ir.MutationOutput(ir.NoneLayout(device=one.get_device()), one, launch))


for _operator in (ops.GATHER_START, ops.GATHER_START_COALESCED):
    register_lowering(_operator, type_promotion_kind=None)(_gathered(_operator))


@register_lowering(WAIT_LATE, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _wait_late(tensor: Any) -> Any:
    """As Inductor's own of ``wait_tensor``: in place, so that what the collective reads and writes lives until then."""
    ir._WaitKernel.create_wait(WAIT_LATE, tensor)
    return tensor
