"""One timeline for prediction and measurement: what ran when, on which lane.

Times are integer nanoseconds from the start of the window, half-open ``[start, end)``, so that interval arithmetic is
exact and a measured trace and a simulated plan go through the same statistics and the same drawing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Span", "SpanKind", "Timeline"]


class SpanKind(enum.StrEnum):
    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Span:
    """One thing that ran.

    Attributes:
        name: the op (predicted) or kernel (measured).
        kind: the class it counts for.
        lane: what ran it: ``"compute"``, a communicator ``"g0"``, a stream ``"stream 20"``, a copy engine.
        start_ns, end_ns: half-open, from the window's start.
        collective: ``"all_gather"``, … for communication.
        payload_bytes: size of the full tensor that travels, where known.
        unit: FSDP module that the collective serves, where known.
        parts: of a predicted collective, how many kernels or copies a trace shows of it.
    """

    name: str
    kind: SpanKind
    lane: str
    start_ns: int
    end_ns: int
    collective: str | None = None
    payload_bytes: int | None = None
    unit: str | None = None
    parts: int = 1

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Timeline:
    """Spans of one step on one rank.

    Attributes:
        label: what the reader calls it: ``"as written"``, ``"scheduled"``, ``"measured, rank 0"``.
        window_ns: length of the step; spans lie in ``[0, window_ns)``.
        spans: sorted by (start, lane, name).
        predicted: from the simulator rather than from a trace.
    """

    label: str
    window_ns: int
    spans: tuple[Span, ...]
    predicted: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "window_ns": self.window_ns,
            "predicted": self.predicted,
            "spans": [_row(span) for span in self.spans],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Timeline:
        spans = tuple(Span(row[0], SpanKind(row[1]), *row[2:]) for row in data["spans"])
        return cls(data["label"], data["window_ns"], spans, data["predicted"])


def _row(span: Span) -> list[Any]:
    row = [span.name, span.kind.value, span.lane, span.start_ns, span.end_ns, span.collective, span.payload_bytes]
    return [*row, span.unit] if span.parts == 1 else [*row, span.unit, span.parts]
