"""What a timeline says about overlap: how long, how much computing, how much communication nothing hides.

Every figure is a length of a union of intervals over all lanes, never a sum over lanes, so that
``compute_ns + exposed_ns + exposed_copy_ns + idle_ns == step_ns`` holds to the nanosecond::

    compute   ████████████████████████········░░░░
    g0            ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
                  └── hidden ──────────┘└ exposed ┘└ idle ┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from overlap_pass.timeline.intervals import Cover, Interval, difference, total_ns, union
from overlap_pass.timeline.spans import Span, SpanKind, Timeline

__all__ = ["CollectiveStats", "OverlapStats", "exposed_intervals", "measure"]


@dataclass(frozen=True, slots=True)
class CollectiveStats:
    """One collective of a timeline.

    Attributes:
        name, collective, unit, lane, payload_bytes, start_ns: as in its :class:`~overlap_pass.timeline.spans.Span`.
        duration_ns: how long it ran.
        exposed_ns: how much of that no compute hid. Where collectives run at once the same nanosecond counts for
            each of them, so the sum over collectives can exceed the step's exposed time.
        exposed_share_ns: the same with each nanosecond divided evenly among the collectives that run in it; the sum
            over collectives is the step's exposed time.
    """

    name: str
    collective: str | None
    unit: str | None
    lane: str
    payload_bytes: int | None
    start_ns: int
    duration_ns: int
    exposed_ns: int
    exposed_share_ns: float


@dataclass(frozen=True, slots=True)
class OverlapStats:
    """Overlap figures of one step on one rank.

    With C, N and M the unions of compute, communication and copy spans:

    Attributes:
        step_ns: length of the window.
        compute_ns: |C|.
        communication_ns: |N|.
        communication_sum_ns: the durations of all collectives added up; above |N| where they run at once.
        exposed_ns: |N − C|. A copy does not hide communication.
        copy_ns: |M|.
        exposed_copy_ns: |M − (C ∪ N)|.
        idle_ns: the window without C, N and M.
        per_collective: one row for each communication span, in the timeline's order.
    """

    step_ns: int
    compute_ns: int
    communication_ns: int
    communication_sum_ns: int
    exposed_ns: int
    copy_ns: int
    exposed_copy_ns: int
    idle_ns: int
    per_collective: tuple[CollectiveStats, ...] = ()

    @property
    def hidden_ns(self) -> int:
        """|N ∩ C|: communication that compute hides."""
        return self.communication_ns - self.exposed_ns

    @property
    def hidden_fraction(self) -> float | None:
        """Hidden part of the communication, from 0.0 to 1.0; ``None`` when there is no communication."""
        return self.hidden_ns / self.communication_ns if self.communication_ns else None

    def worst(self, count: int = 5) -> tuple[CollectiveStats, ...]:
        """The collectives with the most exposed time, worst first; those that are hidden whole are left out."""
        exposed = (row for row in self.per_collective if row.exposed_ns)
        return tuple(sorted(exposed, key=lambda row: (-row.exposed_ns, row.start_ns, row.name))[:count])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_ns": self.hidden_ns, "hidden_fraction": self.hidden_fraction}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> OverlapStats:
        fields = {name: data[name] for name in cls.__slots__}
        rows = tuple(CollectiveStats(**row) for row in data["per_collective"])
        return cls(**{**fields, "per_collective": rows})


def measure(timeline: Timeline) -> OverlapStats:
    """The overlap figures of a timeline, predicted or measured."""
    compute = union(_intervals(timeline.spans, SpanKind.COMPUTE))
    communication = union(_intervals(timeline.spans, SpanKind.COMMUNICATION))
    copies = union(_intervals(timeline.spans, SpanKind.COPY))
    exposed = difference(communication, compute)
    busy = union([*compute, *communication])
    collectives = [span for span in timeline.spans if span.kind is SpanKind.COMMUNICATION]
    return OverlapStats(
        step_ns=timeline.window_ns,
        compute_ns=total_ns(compute),
        communication_ns=total_ns(communication),
        communication_sum_ns=sum(span.duration_ns for span in collectives),
        exposed_ns=total_ns(exposed),
        copy_ns=total_ns(copies),
        exposed_copy_ns=total_ns(difference(copies, busy)),
        idle_ns=total_ns(difference([(0, timeline.window_ns)], union([*busy, *copies]))),
        per_collective=_per_collective(collectives, Cover(exposed)),
    )


def exposed_intervals(timeline: Timeline) -> list[Interval]:
    """Where a collective runs and nothing computes: the set whose length is ``OverlapStats.exposed_ns``."""
    communication = union(_intervals(timeline.spans, SpanKind.COMMUNICATION))
    return difference(communication, union(_intervals(timeline.spans, SpanKind.COMPUTE)))


def _intervals(spans: Iterable[Span], kind: SpanKind) -> Iterable[Interval]:
    return ((span.start_ns, span.end_ns) for span in spans if span.kind is kind)


def _per_collective(collectives: Sequence[Span], exposed: Cover) -> tuple[CollectiveStats, ...]:
    share_before = _share_before(collectives, exposed)
    return tuple(
        CollectiveStats(
            name=span.name,
            collective=span.collective,
            unit=span.unit,
            lane=span.lane,
            payload_bytes=span.payload_bytes,
            start_ns=span.start_ns,
            duration_ns=span.duration_ns,
            exposed_ns=exposed.within_ns(span.start_ns, span.end_ns),
            exposed_share_ns=share_before[span.end_ns] - share_before[span.start_ns],
        )
        for span in collectives
    )


def _share_before(collectives: Sequence[Span], exposed: Cover) -> dict[int, float]:
    """For each start and end t, the integral up to t of (exposed ? 1/k : 0) with k the collectives that run.

    A collective's share is the difference between the values at its end and at its start.
    """
    change = Counter(span.start_ns for span in collectives)
    change.subtract(Counter(span.end_ns for span in collectives))
    times = sorted(change)
    shares = {times[0]: 0.0} if times else {}
    running = 0
    for start, end in pairwise(times):
        running += change[start]
        step = exposed.within_ns(start, end) / running if running else 0.0
        shares[end] = shares[start] + step
    return shares
