"""How much slower kernels run while a collective runs beside them.

A collective takes memory bandwidth, and its kernels take SMs, so what is hidden is not free. Runs of one kernel with one
grid do the same work, if all that ran alone took about as long (a persistent GEMM has one grid for all sizes); those with a
collective beside them are compared with those without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_pass.timeline.intervals import Cover, union
from overlap_pass.timeline.spans import SpanKind
from overlap_pass.traces.kernels import DeviceEvent

__all__ = ["Slowdown", "find_slowdown"]

LEAST_SHARE = 0.5
"""A kernel counts as overlapped when a collective runs for this part of it; with less, and more than none, it is left out."""


ALIKE = 1.5
"""Runs of a kernel alone of which the longest takes more than so many times the shortest do not do the same work."""

LEAST_KERNELS = 3
"""With fewer overlapped kernels there is no factor."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Kernels that ran both with and without a collective beside them.

    Attributes:
        overlapped_ns: what those with one took.
        expected_ns: what they would have taken at the mean of those without.
        kernels: how many those are.
    """

    overlapped_ns: int
    expected_ns: float
    kernels: int

    @property
    def factor(self) -> float | None:
        """How many times longer; ``None`` where too little can be compared."""
        enough = self.kernels >= LEAST_KERNELS and self.expected_ns > 0
        return self.overlapped_ns / self.expected_ns if enough else None


def find_slowdown(events: Sequence[DeviceEvent]) -> Slowdown:
    """The slow-down of compute on one device, of events sorted by start."""
    communication = union(
        (event.span.start_ns, event.span.end_ns) for event in events if event.span.kind is SpanKind.COMMUNICATION
    )
    cover = Cover(communication)
    alone: dict[str, list[int]] = defaultdict(list)
    beside: dict[str, list[int]] = defaultdict(list)
    upcoming = 0
    for event in events:
        span = event.span
        if span.kind is not SpanKind.COMPUTE:
            continue
        while upcoming < len(communication) and communication[upcoming][1] <= span.start_ns:
            upcoming += 1
        if upcoming == len(communication) or communication[upcoming][0] >= span.end_ns:
            alone[event.shape].append(span.duration_ns)
        elif cover.within_ns(span.start_ns, span.end_ns) >= LEAST_SHARE * span.duration_ns:
            beside[event.shape].append(span.duration_ns)
    both = [shape for shape in sorted(alone.keys() & beside.keys()) if max(alone[shape]) <= ALIKE * min(alone[shape])]
    return Slowdown(
        overlapped_ns=sum(sum(beside[shape]) for shape in both),
        expected_ns=sum(len(beside[shape]) * sum(alone[shape]) / len(alone[shape]) for shape in both),
        kernels=sum(len(beside[shape]) for shape in both),
    )
