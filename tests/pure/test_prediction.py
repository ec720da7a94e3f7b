"""What was planned beside what was measured, and the causes that figures show."""

from __future__ import annotations

import pytest

from overlap_pass.report.causes import causes
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.prediction import Prediction
from overlap_pass.timeline.spans import Span, SpanKind, Timeline

MS = 10**6


def _side(label: str, spans: list[tuple[SpanKind, str | None, float, float]], step_ms: float, predicted: bool) -> Side:
    """Spans as (kind, collective, start, end) in milliseconds."""
    made = tuple(
        Span(f"s{number}", kind, "compute" if kind is SpanKind.COMPUTE else "g0", int(start * MS), int(end * MS), collective,
             2**20)
        for number, (kind, collective, start, end) in enumerate(spans)
    )  # fmt: skip
    return Side.of(label, Timeline(label, int(step_ms * MS), made, predicted), peak_bytes=10 * 2**30)


COMPUTE, COMM = SpanKind.COMPUTE, SpanKind.COMMUNICATION


def _plan(spans: list[tuple[SpanKind, str | None, float, float]], step_ms: float) -> Comparison:
    side = _side("scheduled", spans, step_ms, predicted=True)
    return Comparison("", "", side, side, budget_bytes=12 * 2**30)


PLANNED = [
    (COMPUTE, None, 0, 90),
    (COMM, "all_gather", 0, 10),
    (COMM, "all_gather", 20, 26),
    (COMM, "reduce_scatter", 80, 100),
]
MEASURED = [
    (COMPUTE, None, 0, 95),
    (COMM, "all_gather", 1, 9),
    (COMM, "all_gather", 21, 29),
    (COMM, "reduce_scatter", 85, 110),
]


def _prediction(measured: list[tuple[SpanKind, str | None, float, float]]) -> Prediction:
    timeline = _side("overlap", measured, 110, predicted=False).timeline
    return Prediction.beside(_plan(PLANNED, 100), timeline)


def test_collectives_of_a_kind_are_paired_in_the_order_they_start() -> None:
    pairs = _prediction(MEASURED).pairs
    assert [(pair.collective, pair.predicted_ns // MS, pair.measured_ns // MS) for pair in pairs] == [
        ("all_gather", 10, 8),
        ("all_gather", 6, 8),
        ("reduce_scatter", 20, 25),
    ]
    assert [pair.error_percent for pair in pairs] == pytest.approx([25.0, -25.0, -20.0])
    assert pairs[2].measured_start_ns - pairs[2].predicted_start_ns == 5 * MS


def test_a_kind_of_other_number_is_named_and_not_paired() -> None:
    found = _prediction([*MEASURED, (COMM, "all_gather", 40, 50)])
    assert {pair.collective for pair in found.pairs} == {"reduce_scatter"}
    assert found.unpaired == ("all_gather: 2 planned take 16.0 ms, 3 measured 26.0 ms (-38.5 %)",)


def _timeline(spans: list[tuple[str, str, str | None, int, int, int]]) -> Timeline:
    """Spans as (name, lane, collective, start, end, parts), times in milliseconds."""
    made = tuple(
        Span(name, COMM, lane, start * MS, end * MS, kind, parts=parts)
        for name, lane, kind, start, end, parts in sorted(spans, key=lambda span: span[3])
    )
    return Timeline("", 100 * MS, made, predicted=False)


def _copies(stream: int, *at: int) -> list[tuple[str, str, str | None, int, int, int]]:
    """Copies of one millisecond, as a trace shows them."""
    return [("Memcpy PtoP (Device -> Device)", f"stream {stream}", None, start, start + 1, 1) for start in at]


def _beside(planned: Timeline, seen: Timeline) -> Prediction:
    side = Side.of("scheduled", planned)
    return Prediction.beside(Comparison("", "", side, side), seen)


COPIES = _timeline(
    [
        ("gather", "copy engine", "all_gather", 0, 2, 2),
        ("gather_1", "copy engine", "all_gather", 10, 13, 3),
        ("sum", "copy engine", "reduce_scatter", 4, 7, 3),
    ]
)


def test_each_launch_by_copy_has_the_copies_that_it_is_made_of() -> None:
    """Gathers of a forward and of a backward are on streams of their own, reductions on a third."""
    found = _beside(COPIES, _timeline([*_copies(7, 1, 3), *_copies(20, 5, 6, 9), *_copies(21, 12, 13, 14)]))
    assert found.unpaired == ()
    assert [(pair.collective, pair.measured_start_ns // MS, pair.measured_ns // MS) for pair in found.pairs] == [
        ("all_gather by copy", 1, 2),
        ("reduce_scatter by copy", 5, 3),
        ("all_gather by copy", 12, 3),
    ]


def test_streams_that_could_be_either_go_where_their_starts_are_closest() -> None:
    planned = _timeline(
        [("gather", "copy engine", "all_gather", 0, 2, 2), ("sum", "copy engine", "reduce_scatter", 50, 52, 2)]
    )
    found = _beside(planned, _timeline([*_copies(9, 2, 3), *_copies(5, 53, 54)]))
    assert [(pair.collective, pair.measured_start_ns // MS) for pair in found.pairs] == [
        ("all_gather by copy", 2),
        ("reduce_scatter by copy", 53),
    ]


def test_copies_whose_number_does_not_add_up_are_compared_as_a_whole() -> None:
    found = _beside(COPIES, _timeline([*_copies(7, 1, 3), *_copies(20, 5, 6, 9), *_copies(21, 12, 13)]))
    assert found.pairs == ()
    assert found.unpaired == ("copies among GPUs: 3 planned of 8 take 8.0 ms, 7 measured 7.0 ms (+14.3 %)",)


def test_exchanged_gradients_are_a_kernel_for_each_tensor_among_the_reductions() -> None:
    planned = _timeline([("ring", "g0", "reduce_scatter", 0, 4, 1), ("exchange", "g0", "reduce_scatter", 10, 16, 2)])
    seen = _timeline(
        [
            ("ncclDevKernel_ReduceScatter", "stream 3", "reduce_scatter", 1, 6, 1),
            ("ncclDevKernel_SendRecv", "stream 3", "send_recv", 11, 13, 1),
            ("ncclDevKernel_SendRecv", "stream 3", "send_recv", 13, 18, 1),
        ]
    )
    found = _beside(planned, seen)
    assert found.unpaired == ()
    assert [(pair.predicted_ns // MS, pair.measured_ns // MS) for pair in found.pairs] == [(4, 5), (6, 7)]


def test_lines_set_step_exposed_peak_and_each_kind_beside_what_was_measured() -> None:
    measured = _side("overlap", MEASURED, 110, predicted=False)
    lines = _prediction(MEASURED).lines(105_000.0, measured, 11 * 2**30)
    assert lines[0] == "step predicted 100.0 ms, measured 105.0 ms (-4.8 %)"
    assert "exposed predicted 10.0 ms, measured 15.0 ms (-33.3 %)" in lines
    assert "peak predicted 10.0 GiB, measured 11.0 GiB (-9.1 %), budget 12.0 GiB" in lines
    assert any(
        line.startswith("2 × all_gather predicted 16.0 ms, measured 16.0 ms (+0.0 %); each off by 25 %")
        for line in lines
    )


def test_without_a_profiled_step_the_step_and_the_peak_are_compared() -> None:
    found = Prediction.beside(_plan(PLANNED, 100), None)
    assert len(found.lines(100_000.0, None, 10 * 2**30)) == 2
    assert found.to_json()["collectives"] == []


# Causes


def _causes(
    before: list[tuple[SpanKind, str | None, float, float]], after: list, step_ms: float = 100
) -> tuple[str, ...]:
    return causes(_side("fsdp2", before, step_ms, False), _side("overlap", after, step_ms, False))


def test_a_baseline_that_exposes_nothing_leaves_nothing_to_hide() -> None:
    hidden = [(COMPUTE, None, 0, 100), (COMM, "all_gather", 10, 20)]
    assert _causes(hidden, hidden) == ("nothing to hide: fsdp2 exposes 0.0 µs of communication in a step of 100.0 ms",)


def test_a_device_that_waits_for_launches_is_bound_by_the_cpu() -> None:
    waiting = [(COMPUTE, None, 0, 40), (COMM, "all_gather", 40, 50)]
    found = _causes([(COMPUTE, None, 0, 80), (COMM, "all_gather", 80, 100)], waiting)
    assert found[0].startswith("CPU-bound: the device waits 50.0 ms of 100.0 ms")


def test_more_communication_than_compute_has_nothing_to_hide_under() -> None:
    spans = [(COMPUTE, None, 0, 30), (COMM, "all_gather", 0, 100)]
    assert any(cause.startswith("no compute to hide under") for cause in _causes(spans, spans))


def test_compute_that_slows_down_by_what_is_hidden_is_contention() -> None:
    before = [(COMPUTE, None, 0, 80), (COMM, "all_gather", 80, 100)]
    after = [(COMPUTE, None, 0, 100), (COMM, "all_gather", 0, 30)]
    (found,) = _causes(before, after)
    assert found.startswith("contention: 20.0 ms more is hidden, and compute takes 20.0 ms longer")


def test_what_stays_exposed_on_one_communicator_is_named_so() -> None:
    spans = [(COMPUTE, None, 0, 80), (COMM, "all_gather", 10, 60), (COMM, "reduce_scatter", 75, 100)]
    (found,) = _causes(spans, spans)
    assert "20.0 ms stay exposed" in found
    assert "all on one communicator" in found
