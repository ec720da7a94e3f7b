"""Kernels of collectives that share no number with the call that launched them, as ROCm leaves those of RCCL.

Kernels of one stream run in the order that they were launched in. So if the CPU made as many launches of collectives as
there are such kernels, the last belongs to the last, and so on; kernels too many were launched before the trace began::

    CPU                │A      │B      │C
    stream   ▒▒▒▒▒▒      ▒▒▒A▒▒▒  ▒▒B▒▒   ▒▒▒C▒▒▒
             └ launched before the trace began
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap_pass.traces.launches import Launch
from overlap_pass.traces.names import is_collective_kernel
from overlap_pass.traces.records import Event

__all__ = ["link_in_order"]


def link_in_order(
    events: Sequence[Event], launches: Sequence[Launch | None], unanswered: Sequence[Launch]
) -> list[Launch | None]:
    """The launch of each event, those of collectives without a number told by order.

    Nothing is told where the order does not tell: kernels on several streams, more launches than kernels, or a kernel
    that would have begun before its launch.

    Args:
        events: of all devices.
        launches: what numbers say, one for each event.
        unanswered: launches of collectives that no number belongs to, by time.
    """
    found = list(launches)
    lonely = [
        i
        for i, event in enumerate(events)
        if found[i] is None and event.correlation == 0 and is_collective_kernel(event.name)
    ]
    streams = {(events[i].pid, events[i].tid) for i in lonely}
    if len(streams) != 1 or not 0 < len(unanswered) <= len(lonely):
        return found
    lonely.sort(key=lambda i: events[i].start_ns)
    pairs = list(zip(lonely[-len(unanswered) :], unanswered, strict=True))
    if all(launch.start_ns <= events[i].start_ns for i, launch in pairs):
        for i, launch in pairs:
            found[i] = launch
    return found
