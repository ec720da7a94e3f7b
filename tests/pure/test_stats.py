"""The overlap figures: the definitions on paper, a published case, and identities that must hold for any timeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.timeline.concatenate import concatenate
from overlap_pass.timeline.spans import Span, SpanKind, Timeline
from overlap_pass.timeline.stats import OverlapStats, measure

COMPUTE, COMMUNICATION, COPY = SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY
WINDOW_NS = 60


def timeline(window_ns: int, *rows: tuple[SpanKind, str, int, int]) -> Timeline:
    spans = [Span(f"{kind.value} {i}", kind, lane, start, end) for i, (kind, lane, start, end) in enumerate(rows)]
    return Timeline(
        "test", window_ns, tuple(sorted(spans, key=lambda s: (s.start_ns, s.lane, s.name))), predicted=False
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    row = st.tuples(
        st.sampled_from(SpanKind), st.sampled_from(["a", "b"]), st.integers(0, WINDOW_NS - 1), st.integers(1, 25)
    )
    rows = [(kind, lane, start, min(start + length, WINDOW_NS)) for kind, lane, start, length in draw(st.lists(row))]
    return timeline(WINDOW_NS, *rows)


def test_merged_streams_and_copies_give_140_us_of_communication_and_40_us_exposed() -> None:
    """Sums per stream would say 155 µs here, and a copy that hid communication 30 µs exposed.

    ::

        stream 7   gemm 0–100, pointwise 100–110                          gemm 160–200
        stream 20     gather 10–60                      gather 140–150
        stream 21              scatter 50–130
        stream 22                                       copy 140–150
        stream 23                                           reduce 145–160
    """
    stats = measure(
        timeline(
            200_000,
            (COMPUTE, "7", 0, 100_000),
            (COMPUTE, "7", 100_000, 110_000),
            (COMMUNICATION, "20", 10_000, 60_000),
            (COMMUNICATION, "21", 50_000, 130_000),
            (COMMUNICATION, "20", 140_000, 150_000),
            (COPY, "22", 140_000, 150_000),
            (COMMUNICATION, "23", 145_000, 160_000),
            (COMPUTE, "7", 160_000, 200_000),
        )
    )
    assert stats.communication_ns == 140_000
    assert stats.exposed_ns == 40_000
    assert stats.hidden_ns == 100_000
    assert stats.communication_sum_ns == 155_000
    assert stats.compute_ns == 150_000
    assert stats.exposed_copy_ns == 0
    assert stats.idle_ns == 10_000
    assert [row.exposed_ns for row in stats.per_collective] == [0, 20_000, 10_000, 15_000]
    assert [row.exposed_share_ns for row in stats.per_collective] == [0, 20_000, 7_500, 12_500]


def test_a_step_without_communication_has_no_hidden_fraction() -> None:
    stats = measure(timeline(10, (COMPUTE, "compute", 0, 4)))
    assert stats.hidden_fraction is None
    assert stats.idle_ns == 6


def test_an_empty_timeline_is_idle() -> None:
    stats = measure(timeline(10))
    assert (stats.idle_ns, stats.compute_ns, stats.per_collective) == (10, 0, ())


def test_a_copy_counts_as_exposed_only_where_nothing_else_runs() -> None:
    stats = measure(timeline(30, (COMPUTE, "compute", 0, 10), (COMMUNICATION, "g0", 8, 20), (COPY, "copy", 5, 25)))
    assert stats.copy_ns == 20
    assert stats.exposed_copy_ns == 5
    assert stats.exposed_ns == 10
    assert stats.idle_ns == 5


@given(timelines())
def test_the_parts_of_a_step_sum_to_the_step(drawn: Timeline) -> None:
    stats = measure(drawn)
    assert stats.compute_ns + stats.exposed_ns + stats.exposed_copy_ns + stats.idle_ns == stats.step_ns


@given(timelines())
def test_every_figure_equals_a_count_of_nanoseconds(drawn: Timeline) -> None:
    running = [{span.kind for span in drawn.spans if span.start_ns <= t < span.end_ns} for t in range(drawn.window_ns)]
    stats = measure(drawn)
    assert stats.compute_ns == sum(COMPUTE in kinds for kinds in running)
    assert stats.communication_ns == sum(COMMUNICATION in kinds for kinds in running)
    assert stats.exposed_ns == sum(COMMUNICATION in kinds and COMPUTE not in kinds for kinds in running)
    assert stats.exposed_copy_ns == sum(kinds == {COPY} for kinds in running)
    assert stats.idle_ns == sum(not kinds for kinds in running)


@given(timelines())
def test_exposed_shares_sum_to_the_exposed_time_and_never_exceed_a_collectives_own(drawn: Timeline) -> None:
    stats = measure(drawn)
    assert sum(row.exposed_share_ns for row in stats.per_collective) == pytest.approx(stats.exposed_ns)
    for row in stats.per_collective:
        assert row.exposed_share_ns <= row.exposed_ns + 1e-6
        assert row.exposed_ns <= row.duration_ns


@given(timelines())
def test_figures_survive_their_json(drawn: Timeline) -> None:
    stats = measure(drawn)
    assert OverlapStats.from_json(stats.to_json()) == stats


def test_the_worst_collectives_come_first_and_hidden_ones_not_at_all() -> None:
    stats = measure(
        timeline(
            100,
            (COMPUTE, "compute", 0, 50),
            (COMMUNICATION, "g0", 0, 20),
            (COMMUNICATION, "g0", 40, 60),
            (COMMUNICATION, "g0", 60, 90),
        )
    )
    assert [row.exposed_ns for row in stats.worst()] == [30, 10]
    assert [row.exposed_ns for row in stats.worst(1)] == [30]


@given(timelines(), timelines())
def test_figures_of_concatenated_timelines_add_up(first: Timeline, second: Timeline) -> None:
    both, parts = measure(concatenate(first, second, "step")), (measure(first), measure(second))
    for name in ("step_ns", "compute_ns", "communication_ns", "exposed_ns", "exposed_copy_ns", "idle_ns"):
        assert getattr(both, name) == sum(getattr(part, name) for part in parts)


@given(timelines(), timelines())
def test_a_concatenated_timeline_is_sorted_within_its_window(first: Timeline, second: Timeline) -> None:
    both = concatenate(first, second, "step")
    assert list(both.spans) == sorted(both.spans, key=lambda s: (s.start_ns, s.lane, s.name))
    assert all(0 <= span.start_ns < span.end_ns <= both.window_ns for span in both.spans)
    assert both.label == "step"
