"""What an analysis concludes, prints and writes: findings, verdict, notes, and every form of the report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from overlap_pass.cli.main import main
from overlap_pass.report import analysis_html, analysis_perfetto, analysis_terminal
from overlap_pass.report.analysis import SCHEMA, AnalysisReport, dumps
from overlap_pass.traces.advice import LEAST_SHARE, MOST_FINDINGS, Finding
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import read_trace
from tests.pure.test_traces_causes import GEMM, NCCL, Trace, gap, ranks

Golden = Callable[[Path, str], None]
FOLDER = Path(__file__).parent / "golden"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"


def report_of(folder: Path, trace: Trace) -> AnalysisReport:
    return AnalysisReport.of(analyse([read_trace(trace.write(folder / "trace.json"))]))


def kinds(report: AnalysisReport) -> list[str]:
    return [finding.kind for finding in report.findings]


def blocked_gather() -> Trace:
    """All kernels are launched at once; the second matmul waits 60 of 160 µs for its all-gather."""
    trace = Trace().cpu("FSDP::all_gather (layers.1)", 0.5, 1.5, cat="user_annotation")
    return trace.kernel(GEMM, 0, 5, 55).kernel(NCCL, 1, 45, 115).kernel(GEMM, 2, 115, 165)


def slowed(beside: str = NCCL) -> Trace:
    """Three matmuls of 20 µs, then three of 40 µs with a collective beside them."""
    trace = Trace()
    for number in range(3):
        trace.kernel(GEMM, number, 5 + 20 * number, 25 + 20 * number)
        trace.kernel(GEMM, 3 + number, 65 + 40 * number, 105 + 40 * number)
    return trace.kernel(beside, 7, 65, 185, stream=20)


# -- findings ---------------------------------------------------------------------------------------------------------


def test_a_gather_that_compute_waits_for_is_told_to_be_prefetched(tmp_path: Path) -> None:
    report = report_of(tmp_path, blocked_gather())
    finding = report.findings[0]
    assert (finding.kind, finding.cost_ns) == ("blocked all-gather", 60_000)
    assert finding.share == pytest.approx(60 / 160)
    assert "layers.1" in finding.evidence[1]
    assert "prefetch" in finding.action


def test_a_step_that_waits_for_its_cpu_is_not_told_to_prefetch(tmp_path: Path) -> None:
    """The same picture on the device, but each kernel is launched just before it starts."""
    trace = (
        Trace().kernel(GEMM, 0, 5, 55).kernel(NCCL, 40, 45, 115).kernel(GEMM, 112, 115, 165).cpu("aten::mm", 56, 112)
    )
    report = report_of(tmp_path, trace)
    assert kinds(report)[0] == "cpu"
    assert "prefetching, does not help" in report.findings[0].action
    assert not any("prefetch one layer deeper" in finding.action for finding in report.findings)
    assert report.findings[0].cost_ns == 57_000


def test_more_to_send_than_to_compute_names_the_batch_from_which_on_it_is_hidden(tmp_path: Path) -> None:
    """Gathers and scatters take 200 µs, compute 80 µs: 2.5 times the tokens."""
    trace = (
        Trace().kernel(NCCL, 0, 5, 105).kernel(GEMM, 1, 105, 145).kernel(SCATTER, 2, 145, 245).kernel(GEMM, 3, 245, 285)
    )
    finding = next(finding for finding in report_of(tmp_path, trace).findings if finding.kind == "transfer")
    assert "batch size × 2.5" in finding.action
    assert "gradient accumulation is no substitute" in finding.action


def test_accumulation_is_advised_where_it_leaves_compute_to_hide_the_reductions(tmp_path: Path) -> None:
    """A micro-batch computes for 80 µs and gathers for 40: three of them have 120 to hide reductions of 100 µs behind, two only 80."""
    trace = Trace().kernel(NCCL, 0, 5, 45).kernel(GEMM, 1, 45, 85).kernel(SCATTER, 2, 85, 185).kernel(GEMM, 3, 185, 225)
    finding = next(finding for finding in report_of(tmp_path, trace).findings if finding.kind == "transfer")
    assert "batch size × 1.8" in finding.action
    assert "gradient accumulation over 3 micro-batches without sync" in finding.action


def test_traces_of_different_runs_are_told_to_be_compared(tmp_path: Path) -> None:
    report = AnalysisReport.of(
        ranks(tmp_path, *(Trace().kernel(GEMM, 0, 5, 15).kernel(NCCL, 1, 15, 95) for _ in range(2)))
    )
    assert not any("not ranks of one run" in note for note in report.notes)
    devices = [replace(device, world_size=size) for device, size in zip(report.analysis.devices, (2, 8), strict=True)]
    mixed = AnalysisReport.of(replace(report.analysis, devices=tuple(devices)))
    assert any("World sizes differ (2, 8): these are not ranks of one run" in note for note in mixed.notes)


def test_a_rank_that_waits_is_sent_to_the_late_rank_and_not_to_the_network(tmp_path: Path) -> None:
    early = Trace().kernel(GEMM, 0, 5, 15).kernel(NCCL, 1, 15, 95).kernel(GEMM, 2, 95, 105)
    late = Trace().kernel(GEMM, 0, 5, 15).kernel(NCCL, 80, 85, 95).kernel(GEMM, 81, 95, 105)
    late.cpu("enumerate(DataLoader)#x.__next__", 10, 79)
    report = AnalysisReport.of(ranks(tmp_path, early, late))
    finding = next(finding for finding in report.findings if finding.kind == "straggler")
    assert (finding.title, finding.cost_ns, finding.device) == ("rank 0 waits for rank 1", 70_000, "rank 0")
    assert "rank 1, not at the network: give its DataLoader more workers" in finding.action
    assert not any(finding.kind.startswith("blocked") and finding.cost_ns > 10_000 for finding in report.findings)


@pytest.mark.parametrize(
    ("trace", "kind", "words"),
    [
        (gap(("cudaStreamSynchronize", 10, 90), ("aten::_local_scalar_dense", 10, 90)), "sync", ".item()"),
        (gap(("enumerate(DataLoader)#x.__next__", 10, 90)), "dataloader", "num_workers"),
        (gap(("cudaMalloc", 10, 90)), "allocator", "expandable_segments"),
        (gap(("aten::mm", 10, 99)), "cpu", "CUDA graphs"),
        (gap(start=240), "queued", "CUDA_DEVICE_MAX_CONNECTIONS"),
        (Trace().kernel(NCCL, 0, 5, 50, stream=7).kernel(GEMM, 1, 50, 60), "same stream", "async_op=True"),
        (Trace().kernel(GEMM, 0, 5, 50).kernel("Memcpy HtoD", 1, 50, 90).kernel(GEMM, 2, 90, 95), "copies", "non_blocking"),
        (slowed(), "slow compute", "NCCL_MAX_CTAS"),
        (slowed("Memcpy PtoP"), "slow compute", "only fewer bytes help"),
        (Trace().kernel(GEMM, 0, 1, 60).kernel("Memcpy PtoP", 1, 5, 90, stream=20).kernel(GEMM, 2, 90, 95), "blocked unnamed transfer", "earlier"),
    ],
)  # fmt: skip
def test_each_cause_has_its_advice(tmp_path: Path, trace: Trace, kind: str, words: str) -> None:
    finding = next(finding for finding in report_of(tmp_path, trace).findings if finding.kind == kind)
    assert words in finding.action
    assert finding.evidence


def test_a_gemm_of_several_sizes_is_no_measure_of_a_slow_down(tmp_path: Path) -> None:
    """A persistent kernel has the same name and grid for all sizes: one of 60 µs, that runs alone, too, is no slow one of 20."""
    trace = slowed().kernel(GEMM, 8, 190, 250).kernel(GEMM, 9, 260, 270)
    assert [device.slowdown.factor for device in report_of(tmp_path, trace).analysis.devices] == [None]


def test_findings_are_few_large_and_ranked(tmp_path: Path) -> None:
    everything = gap(
        ("cudaStreamSynchronize", 10, 30),
        ("enumerate(DataLoader)#x.__next__", 30, 50),
        ("cudaMalloc", 50, 60),
        ("aten::mm", 60, 70),
        start=150,
    )
    everything.kernel(NCCL, 151, 160, 190).kernel(GEMM, 152, 190, 200).kernel("Memcpy HtoD", 153, 200, 230).kernel(
        GEMM, 154, 238, 250
    )
    found = report_of(tmp_path, everything).findings
    assert len(found) == MOST_FINDINGS
    assert [finding.cost_ns for finding in found] == sorted((finding.cost_ns for finding in found), reverse=True)
    assert all(finding.share >= LEAST_SHARE for finding in found)


def test_a_step_in_which_all_is_hidden_has_nothing_to_be_told(tmp_path: Path) -> None:
    report = report_of(tmp_path, Trace().kernel(GEMM, 0, 5, 505).kernel(NCCL, 1, 100, 200))
    assert report.findings == ()
    assert "Nothing found" in report.verdict


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_verdict_gives_the_parts_of_the_longest_step_and_the_first_finding(tmp_path: Path) -> None:
    assert report_of(tmp_path, blocked_gather()).verdict == (
        "trace.json, whole trace: 160.0 µs = 62.5 % compute + 37.5 % exposed communication + 0.0 % idle + 0.0 % copies. "
        "First: compute waits for all-gathers (60.0 µs a step, 38 % on trace.json)."
    )


def test_the_notes_say_what_is_not_covered(tmp_path: Path) -> None:
    trace = blocked_gather().kernel(GEMM, None, 170, 180).kernel(GEMM, 3, 180, 180)
    notes = " ".join(report_of(tmp_path, trace).notes)
    for words in (
        "no ProfilerStep",
        "1 of 4 device events were launched before",
        "1 device events have no duration",
        "One trace cannot tell",
    ):
        assert words in notes


def test_a_step_whose_kernels_are_missing_is_flagged(tmp_path: Path) -> None:
    trace = (
        blocked_gather()
        .cpu("ProfilerStep#1", 0, 160, cat="user_annotation")
        .cpu("ProfilerStep#2", 160, 300, cat="user_annotation")
    )
    for number in range(5):
        trace.cpu("cudaLaunchKernel", 10 + number, 10.5 + number, cat="cuda_runtime", correlation=900 + number)
    notes = " ".join(report_of(tmp_path, trace).notes)
    assert "step 1: 5 of 8 launched kernels are not in the trace" in notes
    assert "no device events in step 2" in notes


def test_collectives_that_the_cpu_issues_and_the_device_does_not_show_are_missed(tmp_path: Path) -> None:
    trace = Trace().kernel("kernel_of_a_name_to_come", None, 5, 55).cpu("record_param_comms", 0, 3)
    report = report_of(tmp_path, trace)
    assert any("no device event is known as one" in note for note in report.notes)
    assert '"hidden_fraction": null' in dumps(report)


# -- forms ------------------------------------------------------------------------------------------------------------


def two_ranks(folder: Path) -> AnalysisReport:
    """Rank 0 waits 20 µs of its all-gather for rank 1, in two steps."""
    traces = []
    for delay in (0, 20):
        trace = Trace()
        for step, at in ((4, 0), (5, 200)):
            trace.cpu(f"ProfilerStep#{step}", at, at + 200, cat="user_annotation")
            trace.cpu(f"FSDP::all_gather (layers.{step})", at + 0.5, at + 1.5, cat="user_annotation")
            trace.kernel(GEMM, at, at + 5, at + 45).kernel(NCCL, at + 1, at + 25 + delay, at + 105)
            trace.kernel(GEMM, at + 2, at + 105, at + 165).kernel("Memcpy DtoH", at + 160, at + 165, at + 175)
        traces.append(trace)
    return AnalysisReport.of(ranks(folder, *traces))


@pytest.fixture
def report(tmp_path: Path) -> AnalysisReport:
    return two_ranks(tmp_path)


def without_folder(text: str) -> str:
    return re.sub(r'"path": "[^"]*/', '"path": "', text)


@pytest.mark.parametrize("width", [80, 100])
def test_the_terminal_report_is_as_accepted(report: AnalysisReport, width: int, golden: Golden) -> None:
    text = analysis_terminal.render(report, width=width)
    assert max(map(len, text.splitlines())) <= width
    golden(FOLDER / f"analysis_{width}.txt", text)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_of_many_ranks_shows_those_that_fit(tmp_path: Path, width: int) -> None:
    traces = [Trace().kernel(GEMM, 0, 5, 55 + r).kernel(NCCL, 1, 40, 90 + r) for r in range(12)]
    report = AnalysisReport.of(ranks(tmp_path, *traces))
    text = analysis_terminal.render(report, width=width)
    assert max(map(len, text.splitlines())) <= width
    head = next(line for line in text.splitlines() if line.startswith("  ") and "rank 11, whole trace" in line)
    assert ("rank 0, whole trace" in head) is (width > 60)
    assert "of 12 devices" in text


def test_the_json_report_is_as_accepted(report: AnalysisReport, golden: Golden) -> None:
    golden(FOLDER / "analysis.json", without_folder(dumps(report)))


def test_the_markup_of_the_page_is_as_accepted(report: AnalysisReport, golden: Golden) -> None:
    page = analysis_html.render(report)
    for element in ("style", "script"):
        page = re.sub(rf"(<{element}[^>]*>).*?(</{element}>)", r"\1\2", page, flags=re.DOTALL)
    golden(FOLDER / "analysis.html", re.sub(r"'sha256-[^']*'", "'sha256-'", page))


def test_every_field_of_the_json_is_documented(report: AnalysisReport) -> None:
    page = (Path(__file__).parents[2] / "docs" / "analyze.md").read_text("utf-8")
    data = json.loads(dumps(report))
    assert data["schema"] == SCHEMA
    names = set(data) | set(data["devices"][0]) | set(data["devices"][0]["steps"][0]) | set(data["ranks"])
    names |= set(next(filter(None, (step["collectives"] for step in data["devices"][0]["steps"])))[0])
    names |= set(data["findings"][0]) | set(data["devices"][0]["coverage"]) | set(Finding.__slots__)
    assert {name for name in names if f"`{name}`" not in page} == set()


def test_the_perfetto_file_pairs_begins_with_ends_and_loses_no_nanosecond(tmp_path: Path) -> None:
    trace = Trace().kernel(GEMM, 0, 5, 55).kernel(NCCL, 1, 45, 115).kernel(GEMM, 2, 115, 165)
    for row in trace.rows:
        row["ts"] += 1_661_203_463_029_566
    text = json.dumps({"traceEvents": trace.rows}).replace('029681, "dur": 50', '029681.001, "dur": 50')
    path = tmp_path / "trace.json"
    path.write_text(text)
    written = analysis_perfetto.render(AnalysisReport.of(analyse([read_trace(path)])))
    assert '"ts":1661203463029731.001' in written
    events = json.loads(written)["traceEvents"]
    open_now: dict[tuple[str, str], int] = {}
    for event in (event for event in events if event["ph"] in "be"):
        key = event["cat"], event["id"]
        open_now[key] = open_now.get(key, 0) + (1 if event["ph"] == "b" else -1)
        assert open_now[key] in (0, 1)  # on one row nothing overlaps
    assert set(open_now.values()) == {0}
    assert {event["cat"] for event in events if event["ph"] == "b"} == {"step", "exposed", "exposed collectives"}


def test_names_are_text_on_the_page_and_no_markup(tmp_path: Path) -> None:
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    trace = Trace().cpu(f"FSDP::all_gather ({evil})", 0, 3, cat="user_annotation").kernel(GEMM + evil, 0, 5, 55)
    page = analysis_html.render(report_of(tmp_path, trace.kernel(NCCL, 1, 45, 115).kernel(GEMM, 2, 115, 165)))
    assert page.count("<script>") == 1
    assert "<img" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium to open the page in")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_the_page_without_a_complaint(tmp_path: Path, report: AnalysisReport, theme: str) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(analysis_html.render(report), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,1800",
        f"--blink-settings=preferredColorScheme={int(theme == 'light')}", f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={picture}", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "CONSOLE" not in done.stderr
    # The canvas draws: a page whose script stopped is far smaller than one with bars and lanes.
    assert picture.stat().st_size > 40_000


# -- command ----------------------------------------------------------------------------------------------------------


def test_the_command_reads_files_globs_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "rank*.json"), str(tmp_path / "rank0.json")):
        assert main(["analyze", "--json", name]) == 0
        found = json.loads(capsys.readouterr().out)["devices"]
        assert [device["rank"] for device in found] == ([0] if name.endswith("rank0.json") else [0, 1])


def test_two_traces_of_one_rank_are_not_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    paths = [blocked_gather().write(tmp_path / f"{name}.json", distributedInfo={"rank": 0}) for name in "ab"]
    report = AnalysisReport.of(analyse([read_trace(path) for path in paths]))
    assert report.analysis.late_ns is None
    assert any("Several traces are of rank 0" in note for note in report.notes)


def test_a_linked_trace_is_read_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = blocked_gather().write(tmp_path / "rank0.json")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.pt.trace.json").hardlink_to(path)
    assert main(["analyze", "--json", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 1


def test_the_command_writes_every_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    two_ranks(traces)
    page, marks, logs = tmp_path / "page.html", tmp_path / "marks.json", tmp_path / "logs"
    pytest.importorskip("tensorboard")
    assert (
        main(["analyze", str(traces), "--html", str(page), "--perfetto", str(marks), "--tensorboard", str(logs)]) == 0
    )
    assert "overlap-pass" in page.read_text("utf-8")
    assert json.loads(marks.read_text("utf-8"))["traceEvents"]
    assert {path.name for path in logs.iterdir()} >= {"rank0.pt.trace.json", "rank1.pt.trace.json", "overlap-pass.html"}
    assert "compute" in capsys.readouterr().out


def test_the_log_folder_holds_our_figures_for_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from overlap_pass.report import analysis_tensorboard

    analysis_tensorboard.write(two_ranks(tmp_path), tmp_path / "logs")
    log = accumulator.EventAccumulator(str(tmp_path / "logs"))
    log.Reload()
    # Of the 160 µs of step 5, rank 1 has an exposed all-gather from 45 to 105 µs.
    assert [(event.step, event.value) for event in log.Scalars("rank 1/exposed_ms")][-1] == (5, pytest.approx(0.06))
    assert "wrong on traces of current versions" in (tmp_path / "logs" / "overlap-pass.md").read_text("utf-8")
    # The plugin's own charts need a network; this page does not.
    assert (tmp_path / "logs" / "overlap-pass.html").read_text("utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{folder}/absent.json"], "no such file"),
        (["{folder}"], "holds no .json"),
        (["{folder}/rank0.json", "--html", "{folder}/none/page.html"], "there is no folder"),
        (["{folder}/rank0.json", "--html", "{folder}"], "is a folder: name a file in it"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words == "there is no folder":
        two_ranks(tmp_path)
    assert main(["analyze", *(argument.format(folder=tmp_path) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_folder_with_other_json_in_it_is_analyzed_without_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks(tmp_path)
    (tmp_path / "settings.json").write_text('{"a": 1}')
    assert main(["analyze", str(tmp_path)]) == 0
    assert "left out" in capsys.readouterr().err
