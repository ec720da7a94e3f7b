"""Two traces side by side: when a change counts, and when the two must not be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overlap_pass.cli.main import main
from overlap_pass.report.analysis_difference import Difference, Outcome, difference
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import read_trace
from tests.pure.test_traces_causes import GEMM, NCCL, Trace, ranks

FOLDER = Path(__file__).parents[3] / "shared" / "traces"
ARGUMENTS = {"Collective name": "_allgather_base", "In msg nelems": 512, "Out msg nelems": 1024, "dtype": "Float"}


def steps(*exposed_us: float, gathers: int = 1, matmul: str = GEMM) -> Trace:
    """One step for each figure: 100 µs of compute, with that much of an all-gather exposed before it."""
    trace = Trace()
    at = 0.0
    for number, exposed in enumerate(exposed_us):
        trace.cpu(f"ProfilerStep#{number}", at, at + 5, cat="user_annotation")
        trace.cpu("FSDP::all_gather (layers.0)", at + 0.5, at + 1.5, cat="user_annotation")
        for gather in range(gathers):
            part = exposed / gathers
            trace.kernel(NCCL, at + 1, at + 10 + gather * part, at + 10 + (gather + 1) * part, **ARGUMENTS)
        trace.kernel(matmul, at + 2, at + 10 + exposed, at + 110 + exposed)
        at += 110 + exposed
    return trace


def compared(folder: Path, before: Trace, after: Trace) -> Difference:
    first, second = before.write(folder / "before.json"), after.write(folder / "after.json")
    return difference(analyse([read_trace(first)]), analyse([read_trace(second)]))


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ((50, 50, 50), (20, 20, 20), Outcome.IMPROVED),
        ((20, 20, 20), (50, 50, 50), Outcome.WORSE),
        ((50, 50, 50), (49, 49, 49), Outcome.NOISE),
        # Medians differ by 10 of 160 µs, but the steps of each side spread over more.
        ((20, 50, 80), (10, 40, 70), Outcome.NOISE),
    ],
)
def test_the_verdict_is_of_step_times(
    tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...], outcome: Outcome
) -> None:
    found = compared(tmp_path, steps(*before), steps(*after))
    assert found.outcome is outcome
    assert found.comparison.verdict.lower().startswith(outcome.value)
    assert found.comparability == 1.0


def test_the_verdict_says_where_the_time_went(tmp_path: Path) -> None:
    verdict = compared(tmp_path, steps(50, 50, 50), steps(20, 20, 20)).comparison.verdict
    assert verdict == "Improved: step 160.0 µs → 130.0 µs (−18.8 %); compute 0.0 µs, exposed −30.0 µs, idle 0.0 µs."


def test_collectives_are_joined_by_kind_module_and_size(tmp_path: Path) -> None:
    found = compared(tmp_path, steps(50, 50, 50), steps(20, 20, 20))
    (row,) = found.joined
    assert (row.collective, row.unit, row.payload_bytes) == ("all_gather", "layers.0", 4096)
    assert (row.exposed_before_ns, row.exposed_after_ns) == (50_000, 20_000)


def test_other_work_is_not_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, steps(50, 50, 50), steps(60, 60, 60, gathers=3, matmul="another gemm"))
    assert found.outcome is Outcome.NOT_COMPARABLE
    assert found.comparability == pytest.approx(1 / 3)
    assert "33 % of the communication and 0 % of the compute" in found.comparison.verdict


def test_the_same_compute_may_communicate_otherwise(tmp_path: Path) -> None:
    found = compared(tmp_path, steps(50, 50, 50), steps(20, 20, 20, gathers=3))
    assert found.outcome is Outcome.IMPROVED
    assert found.comparability == 1.0


def test_other_numbers_of_ranks_are_not_compared(tmp_path: Path) -> None:
    one = analyse([read_trace(steps(50, 50).write(tmp_path / "one.json"))])
    found = difference(one, ranks(tmp_path, steps(50, 50), steps(50, 50)))
    assert found.outcome is Outcome.NOT_COMPARABLE
    assert "1 devices before, 2 after" in found.comparison.verdict


def test_a_single_step_is_said_to_be_one(tmp_path: Path) -> None:
    notes = " ".join(compared(tmp_path, steps(50), steps(20)).comparison.notes)
    assert "A single step says nothing about noise" in notes


def test_the_command_prints_json_that_reports_can_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from overlap_pass.report import jsonfile

    first, second = steps(50, 50).write(tmp_path / "a.json"), steps(20, 20).write(tmp_path / "b.json")
    page = tmp_path / "page.html"
    assert main(["compare", str(first), str(second), "--json", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["traces"]["outcome"] == "improved"
    assert jsonfile.loads(text).before.stats.exposed_ns == 50_000
    assert "before and after" in page.read_text("utf-8")
    assert main(["compare", str(first), str(second)]) == 0
    assert "all_gather layers.0: 50.0 µs → 20.0 µs" in capsys.readouterr().out


@pytest.mark.skipif(not FOLDER.exists(), reason="no reference traces beside the checkout (../shared/traces)")
def test_workers_for_the_loader_made_a_real_run_faster() -> None:
    """The pair that Kineto ships: a step of about 150 ms becomes one of 120 ms."""
    files = [FOLDER / "kineto-v100x1-dataloader" / f"num_workers_{count}.json.gz" for count in (0, 4)]
    found = difference(*(analyse([read_trace(file)]) for file in files))
    assert found.outcome is Outcome.IMPROVED
    assert found.comparison.after.stats.idle_ns < found.comparison.before.stats.idle_ns - 25_000_000
