"""Files that are no proper JSON, or say what cannot be: what can be read is read, and what was done is counted.

Each case damages one and the same small trace in one way that profilers, killed jobs and editors have done it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.errors import TraceError
from overlap_pass.report.analysis import AnalysisReport, dumps
from overlap_pass.timeline.stats import measure
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import Capture, read_trace, whole

GEMM = "sm90_xmma_gemm_bf16"
NCCL = "ncclDevKernel_AllGather_RING_LL(x)"


def rows() -> list[dict[str, Any]]:
    """Three steps of 100 µs. In each: a matmul of 40 µs, and beside its second half an all-gather of 40 µs."""
    found: list[dict[str, Any]] = []
    for step in range(3):
        at = 100 * step
        found.append(cpu(f"ProfilerStep#{step}", at, 100, cat="user_annotation"))
        found.append(cpu("aten::mm", at + 1, 8))
        for number, (name, start, stream) in enumerate([(GEMM, at + 20, 7), (NCCL, at + 40, 20)]):
            correlation = 10 * step + number + 1
            found.append(cpu("cudaLaunchKernel", at + 2 + number, 1, cat="cuda_runtime", correlation=correlation))
            args = {"device": 0, "stream": stream, "correlation": correlation}
            found.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": name,
                    "pid": 0,
                    "tid": stream,
                    "ts": start,
                    "dur": 40,
                    "args": args,
                }
            )
    return found


def cpu(name: str, start: int, length: int, *, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 900, "tid": 901, "ts": start, "dur": length, "args": args}


def document(*extra: dict[str, Any]) -> str:
    data = {"schemaVersion": 1, "distributedInfo": {"rank": 1, "world_size": 2}, "traceEvents": [*rows(), *extra]}
    return json.dumps({**data, "baseTimeNanoseconds": 7}, indent=1)


WHOLE = document()
NAMED = document(cpu("NAME", 290, 5))


def read(folder: Path, content: str | bytes) -> Capture:
    path = folder / "trace.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_trace(path)


def assert_all_there(capture: Capture) -> None:
    stats = measure(whole(capture))
    assert (stats.compute_ns, stats.communication_ns, stats.exposed_ns) == (120_000, 120_000, 60_000)


@pytest.mark.parametrize(
    ("content", "broken", "mended"),
    [
        pytest.param(WHOLE, 0, 0, id="whole"),
        pytest.param("\ufeff" + WHOLE, 0, 0, id="byte order mark"),
        pytest.param(json.dumps(rows()), 0, 0, id="bare list"),
        pytest.param(WHOLE.replace('"ts": 20,', '"ts": "20",'), 0, 0, id="time in quotes"),
        pytest.param(WHOLE.replace('"ts": 20,', '"ts": 2.0e1,'), 0, 0, id="time with an exponent"),
        pytest.param(NAMED.replace("NAME", "a\tb\x01c"), 0, 0, id="control characters"),
        pytest.param(NAMED.replace("NAME", "caf\xe9").encode("latin-1"), 0, 0, id="latin-1"),
        pytest.param(NAMED.replace("NAME", "C:\\Users\\x\\new"), 0, 1, id="backslashes"),
        pytest.param(NAMED.replace("NAME", "ends with \\"), 0, 1, id="backslash before the quote"),
        pytest.param(NAMED.replace("NAME", 'a "quoted" b'), 0, 1, id="quotes"),
        pytest.param(NAMED.replace('"NAME"', '"NAME'), 1, 0, id="quote missing"),
        pytest.param(NAMED.replace('"ts": 290', '"ts": NaN'), 1, 0, id="NaN"),
        pytest.param(NAMED.replace('"ts": 290', '"ts": null'), 1, 0, id="null"),
        pytest.param(NAMED.replace('"ts": 290', '"ts": 1e400'), 1, 0, id="beyond any clock"),
        pytest.param(NAMED.replace('"ts": 290,', '"ts": 290 "dur"'), 1, 0, id="comma missing"),
        pytest.param(NAMED.replace("NAME", "x" * 9_000_000), 0, 0, id="a name longer than a piece"),
        pytest.param(document(cpu("big", 290, 5, id=2**80)), 0, 0, id="integer beyond 64 bits"),
        pytest.param(WHOLE.replace('"name"', '"Name"', 1).replace('"ph"', '"zz": [{"ph": 1}, {"ph": 2}], "ph"', 1), 0, 0, id="events inside an event"),
        pytest.param(WHOLE.rstrip()[:-1], 0, 0, id="last brace missing"),
    ],
)  # fmt: skip
def test_one_damaged_event_costs_at_most_that_event(
    tmp_path: Path, content: str | bytes, broken: int, mended: int
) -> None:
    capture = read(tmp_path, content)
    assert_all_there(capture)
    assert (capture.unreadable, capture.file.mended) == (broken, mended)
    assert not capture.file.damage


def test_several_broken_events_in_a_row_are_counted_one_by_one(tmp_path: Path) -> None:
    broken = (
        document(*(cpu(f"NAME{i}", 290, 5) for i in range(4))).replace('"NAME1"', '"NAME1').replace('"NAME3"', '"NAME3')
    )
    capture = read(tmp_path, broken)
    assert_all_there(capture)
    assert capture.unreadable == 2


def test_mended_names_are_what_was_meant(tmp_path: Path) -> None:
    names = read(tmp_path, NAMED.replace("NAME", 'C:\\dir "x"')).file.names
    assert 'C:\\dir "x"' in names


def cut_json(share: float) -> bytes:
    return WHOLE[: int(share * len(WHOLE))].encode()


def cut_gzip(share: float) -> bytes:
    packed = gzip.compress((WHOLE + " " * 100_000).encode(), compresslevel=0)
    return packed[: int(share * len(WHOLE))]


INSIDE_THE_LAST_KERNEL = (WHOLE.rindex('"ph"') + 100) / len(WHOLE)


@pytest.mark.parametrize("cut", [cut_json, cut_gzip])
def test_a_file_that_ends_early_is_read_to_there_and_its_last_step_does_not_count(
    tmp_path: Path, cut: Callable[[float], bytes]
) -> None:
    capture = read(tmp_path, cut(INSIDE_THE_LAST_KERNEL))
    assert capture.file.damage
    assert [(step.number, step.counts) for step in capture.steps] == [(0, True), (1, True), (2, False)]
    assert capture.steps[2].cut
    report = AnalysisReport.of(analyse([capture]))
    assert report.analysis.devices[0].step.number in (0, 1)
    assert any("what was there was read" in note for note in report.notes)


@pytest.mark.parametrize("share", [0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("cut", [cut_json, cut_gzip])
def test_no_cut_ends_in_anything_but_figures_or_one_error(
    tmp_path: Path, cut: Callable[[float], bytes], share: float
) -> None:
    error, capture = outcome(tmp_path, cut(share))
    if capture is None:
        assert "trace.json" in error
    else:
        assert 0 < measure(whole(capture)).compute_ns <= 120_000


def outcome(folder: Path, content: bytes) -> tuple[str, Capture | None]:
    try:
        return "", read(folder, content)
    except TraceError as error:
        return str(error), None


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.binary(min_size=0, max_size=3)), min_size=1, max_size=6))
def test_no_damage_ends_in_anything_but_figures_that_add_up_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    content = bytearray(WHOLE.encode())
    for position, written in damage:
        content[position : position + 1] = written
    error, capture = outcome(tmp_path_factory.mktemp("damaged"), bytes(content))
    if capture is None:
        assert "trace.json" in error
    else:
        for step in analyse([capture]).devices[0].steps:
            stats = step.stats
            assert stats.compute_ns + stats.exposed_ns + stats.exposed_copy_ns + stats.idle_ns == stats.step_ns


def test_bytes_that_gzip_cannot_unpack_end_the_file_there(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress((WHOLE + json.dumps(list(range(50_000)))).encode()))
    packed[len(packed) // 2] ^= 0xFF
    packed[len(packed) // 2 + 1] ^= 0xFF
    capture = read(tmp_path, bytes(packed))
    assert_all_there(capture)


def test_two_gzip_members_are_one_file(tmp_path: Path) -> None:
    half = len(WHOLE) // 2
    capture = read(tmp_path, gzip.compress(WHOLE[:half].encode()) + gzip.compress(WHOLE[half:].encode()))
    assert_all_there(capture)
    assert not capture.file.damage


def test_a_kernel_of_years_is_cut_where_the_next_of_its_stream_begins(tmp_path: Path) -> None:
    """Without this the overlap would be 100 %: the file says that the first matmul never ends."""
    capture = read(tmp_path, WHOLE.replace('"ts": 20,\n   "dur": 40', '"ts": 20,\n   "dur": 7400000000000000'))
    assert capture.repairs.clipped == 1
    stats = measure(whole(capture))
    assert stats.step_ns == 260_000
    # Cut at 120 µs, where the second matmul begins; so it runs from 20 to 160 µs without a break.
    assert stats.compute_ns == 180_000


def test_the_last_kernel_of_a_stream_is_cut_at_the_last_start_if_it_cannot_be_true(tmp_path: Path) -> None:
    capture = read(tmp_path, WHOLE.replace('"ts": 220,\n   "dur": 40', '"ts": 220,\n   "dur": 7400000000000000'))
    assert (capture.repairs.capped, measure(whole(capture)).step_ns) == (1, 260_000)


def test_a_small_overlap_on_one_stream_is_legal(tmp_path: Path) -> None:
    """A dependent kernel may be launched before its predecessor has drained."""
    capture = read(tmp_path, WHOLE.replace('"ts": 20,\n   "dur": 40', '"ts": 20,\n   "dur": 110'))
    assert capture.repairs.clipped == 0
    assert max(event.span.duration_ns for event in capture.events) == 110_000


def test_kernels_of_one_graph_may_overlap_on_the_stream_that_they_are_said_to_be_on(tmp_path: Path) -> None:
    extra = [
        {"ph": "X", "cat": "kernel", "name": "branch", "pid": 0, "tid": 5, "ts": at, "dur": 9000, "args": {"device": 0, "stream": 5, "correlation": 99}}
        for at in (10, 20)
    ]  # fmt: skip
    assert read(tmp_path, document(*extra)).repairs.clipped == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is empty"),
        ('{"schemaVersion": 1, "traceEvents": [\n', "no event that can be read"),
        (json.dumps({"traceEvents": [cpu("aten::mm", 0, 5)]}), "no event of a device"),
        (json.dumps({"traceEvents": [{"ph": "M", "name": "process_name", "ts": 1.5}]}), "no event of a device"),
        ("# not a trace\n", "no list 'traceEvents'"),
    ],
)
def test_a_file_without_device_events_is_one_error_that_says_what_to_do(
    tmp_path: Path, content: str, words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        read(tmp_path, content)


def test_a_trace_of_the_device_alone_has_figures_and_says_what_is_not_known(tmp_path: Path) -> None:
    capture = read(tmp_path, json.dumps({"traceEvents": [row for row in rows() if row["cat"] == "kernel"]}))
    assert_all_there(capture)
    report = AnalysisReport.of(analyse([capture]))
    assert any("6 of 6 device events were launched before" in note for note in report.notes)
    assert '"number": null' in dumps(report)
