"""Which kernels and copies of a profiled step belong to which collective of its plan.

A communicator runs its kernels, and a channel its copies, in the order in which they were launched, which is the planned
one. How many a launch becomes is known: one kernel; one for each tensor where gradients are exchanged; one copy for each
tensor and peer by copy engine. So each launch takes as many as it is made of, from the first on. Where the numbers do not
add up (a compiler's own collectives, kernels that a trace does not show), nothing of that kind is paired: what belongs to
what would be a guess. Its times are compared as a whole.

A trace does not say what a copy carries. But all copies of a channel are on streams of its own, so the streams are divided
among gathers and reductions as the numbers allow; of several ways the one whose starts are closest to the planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product

from overlap_pass.cost.model import COPY_ENGINE
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.traces.names import is_peer_copy
from overlap_pass.units import format_us, ns_to_us

__all__ = ["Pair", "Pairing", "off_by", "paired"]

_COPIES = "copies among GPUs"
_BY_COPY = " by copy"
_EXCHANGES = ("all_to_all", "send_recv")
"""What a trace calls exchanged gradients, depending on what it knows of a kernel."""

_MOST_STREAMS = 8
"""With copies, above which they are not divided: each doubles the ways. Graphs take two or three."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One collective as planned and as measured; times from the begin of the step.

    Attributes:
        measured_start_ns: of the first kernel or copy.
        measured_ns: of all together.
    """

    collective: str
    payload_bytes: int | None
    unit: str | None
    predicted_start_ns: int
    predicted_ns: int
    measured_start_ns: int
    measured_ns: int

    @property
    def error_percent(self) -> float:
        """Of the duration."""
        return 100 * (self.predicted_ns / self.measured_ns - 1) if self.measured_ns else 0.0


@dataclass(frozen=True, slots=True)
class Pairing:
    """All collectives of a step.

    Attributes:
        pairs: by measured start.
        unpaired: kinds that could not be paired, with numbers and times of both:
            ``"all_gather: 50 planned take 16.0 ms, 52 measured 17.0 ms (-5.9 %)"``.
    """

    pairs: tuple[Pair, ...]
    unpaired: tuple[str, ...]


def paired(plan: Timeline, measured: Timeline) -> Pairing:
    """The collectives of a simulated step beside those of a profiled one."""
    planned, seen = _by_kind(plan, _planned_kind), _by_kind(measured, _seen_kind)
    if not planned.keys() & set(_EXCHANGES) and (sent := [span for kind in _EXCHANGES for span in seen.pop(kind, ())]):
        seen["reduce_scatter"] = sorted([*seen.get("reduce_scatter", ()), *sent], key=_start)
    copies = seen.pop(_COPIES, [])
    by_copy = {kind: planned.pop(kind) for kind in [*planned] if kind.endswith(_BY_COPY)}
    unpaired = []
    found = _divided(by_copy, copies)
    if found is None:
        unpaired.append(_unpaired_line(_COPIES, [span for spans in by_copy.values() for span in spans], copies))
        found = {}
    for kind in sorted(planned.keys() | seen.keys()):
        ours, theirs = planned.get(kind, []), seen.get(kind, [])
        if _parts(ours) == len(theirs):
            found[kind] = list(_taken(ours, theirs))
        else:
            unpaired.append(_unpaired_line(kind, ours, theirs))
    pairs = [_pair(kind, one, parts) for kind, made in found.items() for one, parts in made]
    return Pairing(tuple(sorted(pairs, key=lambda pair: pair.measured_start_ns)), tuple(unpaired))


def _by_kind(timeline: Timeline, kind_of: Callable[[Span], str]) -> dict[str, list[Span]]:
    """Kind → what communicates, by start."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.kind is SpanKind.COMMUNICATION:
            found[kind_of(span)].append(span)
    return dict(found)


def _planned_kind(span: Span) -> str:
    """Those of a copy engine are kinds of their own."""
    return (span.collective or "unknown") + (_BY_COPY if span.lane == COPY_ENGINE else "")


def _seen_kind(span: Span) -> str:
    """Copies among GPUs, whatever they carry, are one kind."""
    return _COPIES if is_peer_copy(span.name) else span.collective or "unknown"


_Found = list[tuple[Span, list[Span]]]
"""Planned collectives, and what each was made of."""


def _divided(planned: Mapping[str, Sequence[Span]], copies: Sequence[Span]) -> dict[str, _Found] | None:
    """Each kind with its copies, all of a stream for one kind; ``None`` where the numbers do not add up."""
    streams: defaultdict[str, list[Span]] = defaultdict(list)
    for copy in copies:
        streams[copy.lane].append(copy)
    if len(streams) > _MOST_STREAMS:
        return None
    best: tuple[int, dict[str, _Found]] | None = None
    for kinds in product(planned, repeat=len(streams)):
        given: dict[str, list[Span]] = {kind: [] for kind in planned}
        for kind, spans in zip(kinds, streams.values(), strict=True):
            given[kind] += spans
        if any(_parts(planned[kind]) != len(spans) for kind, spans in given.items()):
            continue
        found = {kind: list(_taken(planned[kind], sorted(spans, key=_start))) for kind, spans in given.items()}
        off_ns = sum(abs(one.start_ns - parts[0].start_ns) for pairs in found.values() for one, parts in pairs)
        if best is None or off_ns < best[0]:
            best = off_ns, found
    return None if best is None else best[1]


def _taken(planned: Sequence[Span], seen: Sequence[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each planned collective with as many of what ran, in order, as it is made of."""
    rest = iter(seen)
    for span in planned:
        yield span, list(islice(rest, span.parts))


def _parts(spans: Sequence[Span]) -> int:
    return sum(span.parts for span in spans)


def _start(span: Span) -> int:
    return span.start_ns


def _pair(kind: str, planned: Span, parts: Sequence[Span]) -> Pair:
    return Pair(
        collective=kind,
        payload_bytes=planned.payload_bytes,
        unit=planned.unit,
        predicted_start_ns=planned.start_ns,
        predicted_ns=planned.duration_ns,
        measured_start_ns=parts[0].start_ns,
        measured_ns=sum(part.duration_ns for part in parts),
    )


def _unpaired_line(kind: str, planned: Sequence[Span], seen: Sequence[Span]) -> str:
    predicted_us, measured_us = (ns_to_us(sum(span.duration_ns for span in spans)) for spans in (planned, seen))
    error = off_by(predicted_us, measured_us) if predicted_us else ""
    parts = _parts(planned)
    made = f" of {parts}" if parts != len(planned) else ""
    return f"{kind}: {len(planned)} planned{made} take {format_us(predicted_us)}, {len(seen)} measured {format_us(measured_us)}{error}"


def off_by(predicted_us: float, measured_us: float) -> str:
    """``" (-5.9 %)"``, to stand behind the two; nothing where nothing was measured."""
    return f" ({100 * (predicted_us / measured_us - 1):+.1f} %)" if measured_us else ""
