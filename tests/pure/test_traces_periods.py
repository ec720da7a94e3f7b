"""Steps of traces without ProfilerStep: told by the optimizer, else by the collectives that repeat."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.report.analysis import AnalysisReport
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import Capture, read_trace
from overlap_pass.traces.periods import StepSource, shortest_period
from tests.pure.drawn_traces import GEMM, Trace

GATHER = "ncclDevKernel_AllGather_RING_LL(x)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)"


def looped(steps: int, *, optimizer: bool = False, first: int = 0) -> Trace:
    """Steps of 100 µs, from the one numbered ``first`` on. In each, launched at 0, 2, … 8 µs and run from 10 µs on: two
    gathers, a matmul, a reduction, and the optimizer's kernel. The CPU then has a pause of some 90 µs."""
    trace = Trace()
    for step in range(first, first + steps):
        at = 100 * step
        for place, (name, stream) in enumerate(
            [(GATHER, 20), (GATHER, 20), (GEMM, 7), (SCATTER, 20), ("multi_tensor_apply", 7)]
        ):
            trace.kernel(name, at + 2 * place, at + 10 + 10 * place, at + 20 + 10 * place, stream=stream)
        if optimizer:
            trace.cpu("Optimizer.step#AdamW.step", at + 7, at + 10, cat="user_annotation")
    return trace


def read(folder: Path, trace: Trace) -> Capture:
    return read_trace(trace.write(folder / "trace.json"))


def windows_us(capture: Capture) -> list[tuple[float, float]]:
    return [(step.start_ns / 1000, step.end_ns / 1000) for step in capture.steps]


def test_a_step_is_one_run_of_the_collectives_that_repeat_and_begins_behind_the_cpus_pause(tmp_path: Path) -> None:
    capture = read(tmp_path, looped(4))
    assert capture.steps_from is StepSource.COLLECTIVES
    # The first has no step before it and begins at its first launch; each ends with what it launched last.
    assert windows_us(capture) == [(0, 60), (60, 160), (160, 260), (260, 360)]
    assert [step.partial for step in capture.steps] == [True, False, False, False]


def test_a_trace_that_begins_within_a_step_has_the_same_boundaries(tmp_path: Path) -> None:
    trace = looped(5)
    trace.rows = [row for row in trace.rows if row["ts"] >= 33]
    capture = read(tmp_path, trace)
    assert windows_us(capture) == [(100, 160), (160, 260), (260, 360), (360, 460)]


def test_a_collective_of_its_own_now_and_then_does_not_hide_what_repeats(tmp_path: Path) -> None:
    trace = looped(4).kernel("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(x)", 109, 160, 165, stream=20)
    assert len(read(tmp_path, trace).steps) == 4


def test_the_optimizer_says_more_than_the_collectives(tmp_path: Path) -> None:
    capture = read(tmp_path, looped(4, optimizer=True))
    assert capture.steps_from is StepSource.OPTIMIZER
    # From the end of one Optimizer.step on the CPU, at 10 µs, to the next: what is launched there ends at 160, 260, 360.
    assert [(step.cpu_start_ns / 1000, step.end_ns / 1000) for step in capture.steps] == [
        (10, 160),
        (110, 260),
        (210, 360),
    ]


def test_several_optimizers_that_take_turns_make_one_step(tmp_path: Path) -> None:
    trace = looped(4, optimizer=True)
    for step in range(4):
        trace.cpu("Optimizer.step#Muon.step", 100 * step + 11, 100 * step + 14, cat="user_annotation")
    assert [step.cpu_start_ns / 1000 for step in read(tmp_path, trace).steps] == [14, 114, 214]


def test_the_profilers_own_marks_say_more_than_anything(tmp_path: Path) -> None:
    trace = looped(4, optimizer=True)
    for step in range(4):
        trace.cpu(f"ProfilerStep#{7 + step}", 100 * step, 100 * step + 100, cat="user_annotation")
    capture = read(tmp_path, trace)
    assert capture.steps_from is StepSource.PROFILER
    assert [step.number for step in capture.steps] == [7, 8, 9, 10]


@pytest.mark.parametrize("steps", [1, 2])
def test_what_happens_twice_may_be_chance(tmp_path: Path, steps: int) -> None:
    assert read(tmp_path, looped(steps)).steps_from is StepSource.NOTHING


def test_one_collective_over_and_over_is_a_layer_and_no_step(tmp_path: Path) -> None:
    trace = Trace()
    for layer in range(12):
        trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 10 * layer, 10 * layer + 2, 10 * layer + 8)
    assert read(tmp_path, trace).steps_from is StepSource.NOTHING


@pytest.mark.parametrize(("optimizer", "words"), [(False, "sequence of collectives"), (True, "Optimizer.step")])
def test_the_report_says_what_its_steps_are(tmp_path: Path, optimizer: bool, words: str) -> None:
    report = AnalysisReport.of(analyse([read(tmp_path, looped(4, optimizer=optimizer))]))
    assert any(words in note for note in report.notes)


def test_ranks_whose_steps_were_told_this_way_are_not_matched_by_step(tmp_path: Path) -> None:
    """Rank 1 was traced a step later: its first step is the other one's second."""
    captures = []
    for rank, first in ((0, 0), (1, 1)):
        path = looped(4, first=first).write(tmp_path / f"rank{rank}.json", distributedInfo={"rank": rank})
        captures.append(read_trace(path))
    analysis = analyse(captures)
    by_rank = [device.step.wait_ns for device in analysis.devices]
    # As many collectives on each, so they are matched in order, the shift is taken for the clocks', and nobody waits.
    assert by_rank == [0, 0]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(3, 5), st.integers(0, 5))
def test_the_period_found_is_one_and_none_is_shorter(unit: list[int], repeats: int, more: int) -> None:
    keys = (unit * (repeats + 1))[: len(unit) * repeats + min(more, len(unit))]
    periods = [p for p in range(1, len(keys)) if all(a == b for a, b in zip(keys, keys[p:], strict=False))]
    assert shortest_period(keys) == min(periods)


@given(st.lists(st.integers(0, 3), max_size=30))
def test_no_period_is_claimed_that_does_not_hold_three_times(keys: list[int]) -> None:
    period = shortest_period(keys)
    holds = [p for p in range(1, len(keys) // 3 + 1) if all(keys[i] == keys[i + p] for i in range(len(keys) - p))]
    assert period == (min(holds) if holds else None)
