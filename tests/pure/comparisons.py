"""Small comparisons whose every figure can be checked by hand, for the golden files."""

from __future__ import annotations

from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.schedule.types import Action, Decision
from overlap_pass.timeline.spans import Span, SpanKind, Timeline

__all__ = ["hostile", "measured", "predicted"]

MIB = 2**20


def _timeline(label: str, window_us: int, *spans: Span, predicted: bool) -> Timeline:
    ordered = tuple(sorted(spans, key=lambda s: (s.start_ns, s.lane, s.name)))
    return Timeline(label, window_us * 1000, ordered, predicted)


def _compute(name: str, start_us: int, end_us: int, lane: str = "compute") -> Span:
    return Span(name, SpanKind.COMPUTE, lane, start_us * 1000, end_us * 1000)


def _gather(layer: int, start_us: int, end_us: int) -> Span:
    times = start_us * 1000, end_us * 1000
    return Span(
        f"all_gather_{layer}", SpanKind.COMMUNICATION, "g0", *times, "all_gather", 64 * MIB, f"model.layers.{layer}"
    )


def _scatter(layer: int, start_us: int, end_us: int, lane: str = "g0") -> Span:
    times = start_us * 1000, end_us * 1000
    return Span(
        f"reduce_scatter_{layer}",
        SpanKind.COMMUNICATION,
        lane,
        *times,
        "reduce_scatter",
        64 * MIB,
        f"model.layers.{layer}",
    )


def predicted() -> Comparison:
    """Two layers. As written each gather is waited for at once; scheduled, the second runs beside the first product.

    ::

        as written   gather0 0–400 | mm0 400–1000 | gather1 1000–1400 | mm1 1400–2000 | scatter1 2000–2300
                     step 2300 µs = compute 1200 + exposed 1100; nothing hidden
        scheduled    gather0 0–400 | mm0 400–1000 beside gather1 400–800 | mm1 1000–1600 | scatter1 1600–1900
                     step 1900 µs = compute 1200 + exposed 700; 400 of 1100 hidden (36.4 %)

    Bound 1600 µs: gaps 43.75 % and 18.75 %.
    """
    return Comparison(
        title="Two layers, 2 × H100",
        verdict="The schedule shortens the predicted step by 17.4 % (2.3 ms → 1.9 ms) inside the budget.",
        before=Side.of("as written", _two_layers_as_written(), peak_bytes=256 * MIB),
        after=Side.of("scheduled", _two_layers_scheduled(), peak_bytes=320 * MIB),
        budget_bytes=512 * MIB,
        bound_us=1600.0,
        setting=(
            ("hardware", "h100"),
            ("world", "2"),
            ("model", "two layers of 64 MiB"),
            ("strategy", "latest_start{margin=1.25}"),
            ("versions", "overlap-pass 0.1.0"),
            ("command", "overlap-pass plan two_layers.py --world 2"),
            ("date", "2026-11-29"),
        ),
        decisions=(
            Decision("all_gather_1", Action.HOIST, 1, "400.0 µs hidden under mm_0 (600.0 µs); 64 MiB live earlier"),
            Decision("all_gather_0", Action.KEEP, 0, "nothing computes before it"),
            Decision("reduce_scatter_1", Action.REFUSE, 0, "no compute left to hide it"),
        ),
        notes=("The bound is the longest lane with its unavoidable head and tail.",),
    )


def _two_layers_as_written() -> Timeline:
    return _timeline(
        "as written",
        2300,
        _gather(0, 0, 400),
        _compute("mm_0", 400, 1000),
        _gather(1, 1000, 1400),
        _compute("mm_1", 1400, 2000),
        _scatter(1, 2000, 2300),
        predicted=True,
    )


def _two_layers_scheduled() -> Timeline:
    return _timeline(
        "scheduled",
        1900,
        _gather(0, 0, 400),
        _compute("mm_0", 400, 1000),
        _gather(1, 400, 800),
        _compute("mm_1", 1000, 1600),
        _scatter(1, 1600, 1900),
        predicted=True,
    )


def measured() -> Comparison:
    """A measured pair on streams, with a copy, a gap and unprofiled samples; worse than before, and over its budget.

    ::

        before   gemm 0–50 | gather 20–60 | copy 60–70 | idle 70–80     compute 50, exposed 10, copy 10, idle 10: 80
        after    gemm 0–60 | gather 60–90                               compute 60, exposed 30: 90
    """
    kernel = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

    def gather(start_us: int, end_us: int) -> Span:
        times = start_us * 1000, end_us * 1000
        return Span(kernel, SpanKind.COMMUNICATION, "stream 20", *times, "all_gather")

    copy = Span("Memcpy DtoD (Device -> Device)", SpanKind.COPY, "stream 7", 60_000, 70_000)
    before = _timeline("before", 80, _compute("gemm", 0, 50, "stream 7"), gather(20, 60), copy, predicted=False)
    after = _timeline("after", 90, _compute("gemm", 0, 60, "stream 7"), gather(60, 90), predicted=False)
    return Comparison(
        title="Measured on 2 GPUs",
        verdict="Keep the order as written: scheduled is 12.5 % slower.",
        before=Side.of("as written", before, peak_bytes=MIB, step_samples_us=(78.0, 79.0, 80.0, 81.0, 82.0)),
        after=Side.of("scheduled", after, peak_bytes=3 * MIB, step_samples_us=(90.0, 90.0, 90.0)),
        budget_bytes=2 * MIB,
    )


def hostile() -> Comparison:
    """Names that try to be markup, for HTML, for a script element and for rich."""
    name = "</script><script>alert(1)</script>"
    gather = Span(name, SpanKind.COMMUNICATION, "[red]g0", 0, 1000, "<b>all_gather", 1, "model.<script>\u2028&amp;")
    step = Timeline("<i>step", 1000, (gather,), predicted=True)
    side = Side.of("<u>[bold]side", step)
    return Comparison(
        title="<title>[link]",
        verdict="<img src=x onerror=alert(1)> [/red]",
        before=side,
        after=side,
        setting=(("<dt>", "\"'><script>"),),
        decisions=(Decision(name, Action.KEEP, 0, "<script>"),),
        notes=("<!-- --> <!--slot:script-->",),
    )
