"""Kernels of RCCL carry correlation 0: their launches are told by order, or not at all."""

from __future__ import annotations

from pathlib import Path

from overlap_pass.report.analysis import AnalysisReport
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import Capture, read_trace
from overlap_pass.traces.kernels import DeviceEvent, Rule
from tests.pure.drawn_traces import GEMM, Trace

RCCL = "ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)"


def collective(
    trace: Trace, launch: float | None, start: float, *, op: str = "c10d::_allgather_base_", **more: int
) -> Trace:
    """A kernel of RCCL of 10 µs without a number, and 2 µs of an op with its launch at ``launch``."""
    trace.kernel(RCCL, None, start, start + 10, correlation=0, **more)
    if launch is not None:
        trace.cpu(op, launch - 1, launch + 1)
        trace.cpu("hipExtLaunchKernel", launch, launch + 0.5, cat="cuda_runtime", correlation=1000 + round(launch))
    return trace


def read(folder: Path, trace: Trace) -> list[DeviceEvent]:
    return [event for event in capture(folder, trace).events if event.rule is not None]


def capture(folder: Path, trace: Trace) -> Capture:
    return read_trace(trace.write(folder / "trace.json"))


def launches_us(events: list[DeviceEvent]) -> list[float | None]:
    return [None if event.launch_ns is None else event.launch_ns / 1000 for event in events]


def test_the_last_kernel_belongs_to_the_last_launch_and_those_too_many_began_before_the_trace(tmp_path: Path) -> None:
    trace = Trace().kernel(GEMM, 1, 5, 90)
    for launch, start in ((None, 2), (3, 20), (15, 40), (16, 60)):
        collective(trace, launch, start)
    events = read(tmp_path, trace)
    assert launches_us(events) == [None, 3, 15, 16]


def test_the_op_around_the_launch_says_which_collective_it_is_and_the_name_that_it_is_one(tmp_path: Path) -> None:
    trace = collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20)
    collective(trace, 15, 40, op="c10d::_reduce_scatter_base_")
    events = read(tmp_path, trace)
    assert [event.span.collective for event in events] == ["all_gather", "reduce_scatter"]
    assert {event.rule for event in events} == {Rule.NAME}


def test_more_launches_than_kernels_tell_nothing(tmp_path: Path) -> None:
    trace = collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20)
    trace.cpu("c10d::allreduce_", 14, 16).cpu("hipExtLaunchKernel", 15, 15.5, cat="cuda_runtime", correlation=99)
    assert launches_us(read(tmp_path, trace)) == [None]


def test_a_kernel_before_its_launch_shows_that_the_order_is_not_theirs(tmp_path: Path) -> None:
    trace = collective(collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20), 50, 40)
    assert launches_us(read(tmp_path, trace)) == [None, None]


def test_several_streams_tell_nothing(tmp_path: Path) -> None:
    trace = collective(collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20), 15, 40, stream=21)
    assert launches_us(read(tmp_path, trace)) == [None, None]


def test_launches_of_compute_are_not_taken_for_those_of_collectives(tmp_path: Path) -> None:
    trace = collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20)
    trace.cpu("aten::mm", 14, 16).cpu("hipLaunchKernel", 15, 15.5, cat="cuda_runtime", correlation=98)
    assert launches_us(read(tmp_path, trace)) == [3]


def test_what_was_told_by_order_is_counted_in_the_report(tmp_path: Path) -> None:
    trace = collective(collective(Trace().kernel(GEMM, 1, 5, 90), 3, 20), 15, 40)
    report = AnalysisReport.of(analyse([capture(tmp_path, trace)]))
    assert report.analysis.devices[0].coverage.in_order == 2
    assert any("told by their order" in note for note in report.notes)


def test_a_step_ends_with_a_collective_whose_launch_was_told_by_order(tmp_path: Path) -> None:
    trace = Trace()
    for step in range(2):
        at = 100 * step
        trace.cpu(f"ProfilerStep#{step}", at, at + 100, cat="user_annotation")
        collective(trace.kernel(GEMM, at + 1, at + 5, at + 50), at + 3, at + 80)
    assert [step.end_ns / 1000 for step in capture(tmp_path, trace).steps] == [90, 190]
