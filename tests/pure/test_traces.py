"""Traces written by hand: one rule, one boundary or one kind of damage each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.errors import TraceError
from overlap_pass.timeline.spans import SpanKind
from overlap_pass.timeline.stats import measure
from overlap_pass.traces.capture import Capture, read_trace, timelines, whole
from overlap_pass.traces.kernels import Rule

Row = dict[str, Any]
GEMM = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64>(cutlass::Params)"
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def device(name: str, start_us: float, dur_us: float, *, stream: int = 7, cat: str = "kernel", **args: Any) -> Row:
    args = {"device": 0, "stream": stream, **args}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": dur_us, "args": args}


def cpu(name: str, start_us: float, dur_us: float, *, cat: str = "cpu_op", **args: Any) -> Row:
    return {"ph": "X", "cat": cat, "name": name, "pid": 900, "tid": 901, "ts": start_us, "dur": dur_us, "args": args}


def launch(correlation: int, start_us: float) -> Row:
    return cpu("cudaLaunchKernel", start_us, 1, cat="cuda_runtime", correlation=correlation)


def mark(number: int, start_us: float, dur_us: float) -> Row:
    return cpu(f"ProfilerStep#{number}", start_us, dur_us, cat="user_annotation")


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Capture]:
    def write_and_read(*rows: Row, **document: Any) -> Capture:
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({**document, "traceEvents": list(rows)}))
        return read_trace(path)

    return write_and_read


# -- times ------------------------------------------------------------------------------------------------------------


def test_times_keep_every_nanosecond_of_a_large_epoch(tmp_path: Path) -> None:
    """As floats these two times are 0.25 µs apart at best."""
    path = tmp_path / "trace.json"
    row = json.dumps(device(GEMM, 0, 0))
    first = row.replace('"ts": 0, "dur": 0', '"ts": 1661203463029566.123, "dur": 0.001')
    second = row.replace('"ts": 0, "dur": 0', '"ts": 1661203463029566.125, "dur": 0.002')
    path.write_text(f'{{"traceEvents": [{first}, {second}]}}')
    spans = whole(read_trace(path)).spans
    assert [(span.start_ns, span.end_ns) for span in spans] == [(0, 1), (2, 4)]


def test_events_that_take_no_time_are_left_out(read: Callable[..., Capture]) -> None:
    capture = read(device(GEMM, 10, 5), device(GEMM, 20, 0), device(GEMM, 30, -1))
    assert len(capture.events) == 1


# -- what an event is -------------------------------------------------------------------------------------------------


def only(capture: Capture) -> tuple[SpanKind, Rule | None, str | None]:
    (event,) = capture.events
    return event.span.kind, event.rule, event.span.collective


def test_arguments_name_the_collective_and_its_size(read: Callable[..., Capture]) -> None:
    arguments = {
        "Collective name": "_allgather_base",
        "In msg nelems": 1024,
        "Out msg nelems": 2048,
        "dtype": "BFloat16",
    }
    capture = read(device("ncclDevKernel_Generic_4(x)", 0, 5, stream=20, **arguments))
    assert only(capture) == (SpanKind.COMMUNICATION, Rule.ARGUMENTS, "all_gather")
    assert capture.events[0].span.payload_bytes == 4096
    assert capture.events[0].span.lane == "stream 20"


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        (NCCL, "all_gather"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclSymDevKernel_AllGather_LL", "all_gather"),
        ("ncclSymkDevKernel_ReduceScatter_LD_bf16(x)", "reduce_scatter"),
        ("ncclDevKernel_Generic_1(x)", None),
        ("rccl_main_kernel", None),
        ("mscclKernel_Sum_half", None),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce"),
        ("void two_shot_all_reduce_kernel<float>(float*)", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<__half, 2>(vllm::RankData*)", "all_reduce"),
        ("nvshmemi_transfer_rma_get", None),
        ("void deep_ep::internode::dispatch<false>(int4*)", None),
    ],
)
def test_names_of_communication_kernels_are_known(
    read: Callable[..., Capture], name: str, collective: str | None
) -> None:
    assert only(read(device(name, 0, 5))) == (SpanKind.COMMUNICATION, Rule.NAME, collective)


@pytest.mark.parametrize(
    "name",
    [
        GEMM,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "triton_poi_fused_all_gather_like_name_0",
        "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel(char**)",
        "void consumer<vllm::cross_device_reduce_args>(int)",
    ],
)
def test_every_other_kernel_is_compute(read: Callable[..., Capture], name: str) -> None:
    assert only(read(device(name, 0, 5))) == (SpanKind.COMPUTE, None, None)


def test_copy_in_and_out_of_a_collective_compute_and_the_copy_that_it_issues_communicates(
    read: Callable[..., Capture],
) -> None:
    """A copy-engine all-gather is a memory copy on the device; only its launch tells it from any other."""
    capture = read(
        cpu("c10d::_allgather_base_", 0, 100),
        cpu("aten::copy_", 10, 20),
        launch(1, 15),
        cpu("record_param_comms", 40, 20),
        launch(2, 45),
        device("copy_kernel", 200, 5, correlation=1),
        device("Memcpy PtoP (Device -> Device)", 210, 5, stream=20, cat="gpu_memcpy", correlation=2),
        device("Memcpy DtoD (Device -> Device)", 220, 5, cat="gpu_memcpy"),
    )
    assert [(event.span.kind, event.rule) for event in capture.events] == [
        (SpanKind.COMPUTE, None),
        (SpanKind.COMMUNICATION, Rule.LAUNCH),
        (SpanKind.COPY, None),
    ]


def test_a_copy_between_devices_communicates_whoever_started_it(read: Callable[..., Capture]) -> None:
    """Kineto records no call of the driver's own copies: nothing but their name tells what they are."""
    capture = read(
        device("Memcpy PtoP (Device -> Device)", 210, 5, stream=20, cat="gpu_memcpy"),
        device("Memcpy DtoD (Device -> Device)", 220, 5, cat="gpu_memcpy"),
        cpu("overlap_pass::exchange_start_coalesced", 300, 50),
        launch(3, 310),
        device("Memcpy DtoD (Device -> Device)", 400, 5, stream=21, cat="gpu_memcpy", correlation=3),
    )
    assert [(event.span.kind, event.rule, event.span.collective) for event in capture.events] == [
        (SpanKind.COMMUNICATION, Rule.NAME, None),
        (SpanKind.COPY, None, None),
        (SpanKind.COMMUNICATION, Rule.LAUNCH, "reduce_scatter"),
    ]


def test_an_annotation_counts_on_its_own_stream_only(read: Callable[..., Capture]) -> None:
    capture = read(
        device("nccl:all_gather", 0, 10, stream=20, cat="gpu_user_annotation"),
        device("strange_kernel", 1, 5, stream=20),
        device("strange_kernel", 1, 5, stream=7),
        device("strange_kernel", 8, 5, stream=20),
    )
    assert [event.rule for event in capture.events] == [Rule.ANNOTATION, None, None]


@pytest.mark.parametrize(
    ("cat", "name"),
    [
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
        ("gpu_memset", "Memset (Device)"),
        ("Memcpy", "Memcpy DtoH"),
        ("kernel", "__amd_rocclr_copyBuffer.kd"),
        ("kernel", "__amd_rocclr_fillBufferAligned.kd"),
    ],
)
def test_copies_and_fills_are_copies(read: Callable[..., Capture], cat: str, name: str) -> None:
    assert only(read(device(name, 0, 5, cat=cat)))[0] is SpanKind.COPY


def test_a_stream_number_does_not_make_an_event_run_on_the_device(read: Callable[..., Capture]) -> None:
    """Inductor notes a stream on its CPU ops, and waiting for a stream is no work on it."""
    capture = read(
        device(GEMM, 0, 5),
        cpu("triton_poi_fused_0", 10, 50, stream=0),
        device("Stream Sync", 10, 500, cat="cuda_sync"),
    )
    assert measure(whole(capture)).step_ns == 5000


# -- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_ends_with_the_last_event_launched_in_it_and_the_first_is_partial(read: Callable[..., Capture]) -> None:
    """The device lags: what step 4 launched still runs while the CPU is in step 5, and ends at 150 µs."""
    capture = read(
        mark(4, 0, 100),
        mark(5, 100, 100),
        mark(6, 200, 100),
        launch(1, 10),
        launch(2, 90),
        launch(3, 110),
        launch(4, 210),
        device(GEMM, 20, 30, correlation=1),
        device(GEMM, 100, 50, correlation=2),
        device(GEMM, 160, 70, correlation=3),
        device(GEMM, 240, 100, correlation=4),
        device(GEMM, 5, 5, correlation=77),
    )
    assert [(s.number, s.start_ns, s.end_ns, s.partial) for s in capture.steps] == [
        (4, 0, 150_000, True),
        (5, 150_000, 230_000, False),
        (6, 230_000, 340_000, False),
    ]
    assert capture.unlinked == 1
    fifth, sixth = timelines(capture)
    assert (fifth.label, fifth.window_ns) == ("trace.json, step 5", 80_000)
    assert [(span.start_ns, span.end_ns) for span in fifth.spans] == [(10_000, 80_000)]
    assert sixth.window_ns == 110_000
    assert not sixth.predicted


def test_marks_on_the_devices_own_timeline_are_not_steps(read: Callable[..., Capture]) -> None:
    capture = read(device("ProfilerStep#4", 0, 10, cat="gpu_user_annotation"), device(GEMM, 0, 5))
    assert capture.steps == ()


def test_the_step_behind_a_pause_of_the_profiler_is_partial_again(read: Callable[..., Capture]) -> None:
    rows = [
        row
        for number, start in ((4, 0), (5, 100), (9, 500), (10, 600))
        for row in (mark(number, start, 100), launch(number, start), device(GEMM, start + 50, 10, correlation=number))
    ]
    assert [(s.number, s.partial) for s in read(*rows).steps] == [(4, True), (5, False), (9, True), (10, False)]


def test_all_kernels_of_a_cuda_graph_belong_to_the_step_of_its_one_launch(read: Callable[..., Capture]) -> None:
    capture = read(
        mark(1, 0, 10),
        mark(2, 10, 10),
        launch(5, 1),
        launch(6, 11),
        device(GEMM, 2, 10, correlation=5),
        device(GEMM, 12, 10, correlation=5),
        device(GEMM, 22, 10, correlation=6),
        device(GEMM, 32, 10, correlation=6),
    )
    assert [(s.start_ns, s.end_ns) for s in capture.steps] == [(0, 22_000), (22_000, 42_000)]


def test_an_event_across_a_boundary_counts_on_each_side_for_its_part(read: Callable[..., Capture]) -> None:
    capture = read(
        mark(1, 0, 10),
        mark(2, 10, 10),
        mark(3, 20, 10),
        launch(1, 1),
        launch(2, 11),
        launch(3, 21),
        device(GEMM, 2, 8, correlation=1),
        device(GEMM, 12, 8, correlation=2),
        device(GEMM, 30, 10, correlation=3),
        device(NCCL, 15, 10, stream=20),
    )
    second, third = (measure(timeline) for timeline in timelines(capture))
    assert (second.communication_ns, third.communication_ns) == (5_000, 5_000)


def test_a_trace_without_a_complete_step_is_one_timeline_that_says_so(read: Callable[..., Capture]) -> None:
    capture = read(device(GEMM, 10, 5), device(NCCL, 20, 5, stream=20), distributedInfo={"rank": 3, "world_size": 8})
    (timeline,) = timelines(capture)
    assert timeline.label == "rank 3, whole trace"
    assert (timeline.window_ns, capture.world_size) == (15_000, 8)


def test_devices_never_hide_each_others_communication(read: Callable[..., Capture]) -> None:
    capture = read(device(GEMM, 0, 10, device=0), device(NCCL, 0, 10, device=1))
    first, second = timelines(capture)
    assert measure(first).exposed_ns == 0
    assert measure(second).exposed_ns == 10_000
    assert second.label == "trace.json, device 1, whole trace"


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_oldest_kineto_format_is_read(tmp_path: Path) -> None:
    path = tmp_path / "worker-rank_2.json"
    kernel = {"ph": "X", "cat": "Kernel", "name": GEMM, "pid": 0, "tid": "stream 7", "ts": 100, "dur": 5}
    kernel["args"] = {"device": 0, "stream": 7, "correlation": 5, "external id": 9}
    call = {"ph": "X", "cat": "Runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": "9", "ts": 90, "dur": 5}
    call["args"] = {"correlation": 5}
    step = {"ph": "X", "cat": "Operator", "name": "ProfilerStep#3", "pid": 9, "tid": "9", "ts": 80, "dur": 50}
    path.write_text(json.dumps({"traceEvents": [kernel, call, step]}))
    capture = read_trace(path)
    assert capture.rank == 2
    assert [step.number for step in capture.steps] == [3]
    assert capture.unlinked == 0


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [device(GEMM, 0, 5)]}).encode()))
    assert len(read_trace(path).events) == 1


def test_bad_bytes_control_characters_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    text = json.dumps({"traceEvents": [device("name", 0, 5)]}).encode()
    path.write_bytes(b"\xef\xbb\xbf" + text.replace(b'"name": "name"', b'"name": "caf\xe9\ttab"'))
    assert read_trace(path).events[0].span.name == "caf\ufffd\ttab"


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([device(GEMM, 0, 5)]))
    assert len(read_trace(path).events) == 1


def test_broken_events_are_left_out_and_counted(read: Callable[..., Capture]) -> None:
    broken: list[Any] = [
        {**device(GEMM, 0, 5), "ts": None},
        {**device(GEMM, 0, 5), "dur": "long"},
        {**device(GEMM, 0, 5), "dur": float("nan")},
        {**device(GEMM, 0, 5), "ts": float("inf")},
        {key: value for key, value in device(GEMM, 0, 5).items() if key != "ts"},
        "no event",
    ]
    capture = read(device(GEMM, 0, 5), *broken)
    assert len(capture.events) == 1
    assert capture.unreadable == len(broken)


def test_times_in_quotes_are_read(read: Callable[..., Capture]) -> None:
    capture = read({**device(GEMM, 0, 5), "ts": "10.001", "dur": "2.5"})
    assert (capture.events[0].span.start_ns, capture.events[0].span.end_ns) == (10_001, 12_501)


COMPLETE = json.dumps({"traceEvents": [device(GEMM, 0, 5)]}).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (COMPLETE[:-20], "not written to its end"),
        (gzip.compress(COMPLETE)[:-12], "gzip"),
        (b"\x1f\x8bgarbage", "gzip"),
        (b'{"schemaVersion": 1}', "traceEvents"),
        (b'{"traceEvents": 3}', "traceEvents"),
        (b"3", "traceEvents"),
        (b'{"traceEvents": []}', "no event of a device"),
        (json.dumps({"traceEvents": [cpu("aten::mm", 0, 5)]}).encode(), "no event of a device"),
    ],
)
def test_a_file_that_says_nothing_is_an_error_with_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.json"):
        read_trace(tmp_path / "absent.json")
