"""Real traces against an independent measurement of them, to the last digit it prints.

The traces are third-party files and not part of the project: where ``../shared/traces`` is absent, these tests skip.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.timeline.stats import OverlapStats, measure
from overlap_pass.traces.capture import Capture, read_trace, timeline_of, timelines, whole
from overlap_pass.traces.kernels import Rule

FOLDER = Path(__file__).parents[3] / "shared" / "traces"
MANIFEST = FOLDER / "MANIFEST.json"
FIGURES: dict[str, Any] = (
    {entry["file"]: entry["ref"] for entry in json.loads(MANIFEST.read_text())} if MANIFEST.exists() else {}
)

pytestmark = pytest.mark.skipif(not FIGURES, reason="no reference traces beside the checkout (../shared/traces)")


@pytest.fixture(scope="module", params=sorted(FIGURES) or ["absent"])
def reference(request: pytest.FixtureRequest) -> tuple[Capture, dict[str, Any]]:
    return read_trace(FOLDER / request.param), FIGURES[request.param]


def busy_us(stats: OverlapStats) -> dict[str, float]:
    """The figures under the reference's names; it prints whole nanoseconds."""
    figures = {
        "compute": stats.compute_ns,
        "comm": stats.communication_ns,
        "overlap": stats.hidden_ns,
        "exposed": stats.exposed_ns,
        "memcpy": stats.copy_ns,
        "exposed_memcpy": stats.exposed_copy_ns,
    }
    return {name: time_ns / 1000 for name, time_ns in figures.items()}


def test_the_whole_trace_has_the_reference_figures(reference: tuple[Capture, dict[str, Any]]) -> None:
    capture, expected = reference
    stats = measure(whole(capture))
    found = busy_us(stats) | {
        "total": stats.step_ns / 1000,
        "idle": stats.idle_ns / 1000,
        "comm_sum": stats.communication_sum_ns / 1000,
        "n_comm": len(stats.per_collective),
    }
    assert found == {name: expected["all"][name] for name in found}
    assert capture.unlinked == expected["unlinked"]
    assert capture.rank == expected["rank"]
    hidden = None if stats.hidden_fraction is None else round(100 * stats.hidden_fraction, 2)
    assert hidden == (expected["all"]["overlap_pct"] if expected["all"]["comm"] else None)


def test_every_step_has_the_reference_busy_times(reference: tuple[Capture, dict[str, Any]]) -> None:
    capture, expected = reference
    found = {f"tail:{step.number}": busy_us(measure(timeline_of(capture, step))) for step in capture.steps}
    assert set(found) == {name for name in expected if name.startswith("tail:")}
    for name, figures in found.items():
        assert figures == {figure: expected[name][figure] for figure in figures}, name


def test_device_boundaries_give_the_reference_step_lengths(reference: tuple[Capture, dict[str, Any]]) -> None:
    """The reference widens a step to the CPU's mark on a side where the device had nothing left to do; ours does not,
    so that steps lie end to end. With its rule applied to our boundaries, lengths agree to the nanosecond."""
    capture, expected = reference
    for step in capture.steps:
        widened_ns = max(step.end_ns, step.cpu_end_ns) - max(step.start_ns, step.cpu_start_ns)
        assert widened_ns / 1000 == expected[f"tail:{step.number}"]["total"], step.number


def test_steps_lie_end_to_end_and_only_the_first_is_partial(reference: tuple[Capture, dict[str, Any]]) -> None:
    capture, _ = reference
    assert [step.partial for step in capture.steps] == [position == 0 for position in range(len(capture.steps))]
    for before, after in zip(capture.steps, capture.steps[1:], strict=False):
        assert before.end_ns == after.start_ns
    complete = [step for step in capture.steps if not step.partial]
    assert len(timelines(capture)) == max(1, len(complete))


@pytest.mark.parametrize(
    ("file", "rules"),
    [
        ("hta-a100x2-ncclargs/rank-0.json.gz", {(Rule.ARGUMENTS, "all_reduce"): 15, (Rule.ARGUMENTS, "broadcast"): 6}),
        # 42 all-to-alls that NCCL's kernels call SendRecv: only the CPU op tells.
        ("hta-a100x8-diffcontrol/rank-3.json.gz", {(Rule.LAUNCH, "all_to_all"): 42, (Rule.LAUNCH, "all_reduce"): 18}),
        # Four collectives were launched before the profiler started: only their names are left.
        (
            "hta-v100x2-difftest/rank-1.json.gz",
            {
                (Rule.LAUNCH, "all_to_all"): 42,
                (Rule.LAUNCH, "all_reduce"): 18,
                (Rule.NAME, "all_reduce"): 3,
                (Rule.NAME, "send_recv"): 1,
            },
        ),
        # Symmetric-memory kernels on the compute stream, which stream and name lists miss.
        ("tracelens-b200x8-eager/rank-0.json.gz", {(Rule.LAUNCH, "all_reduce"): 73, (Rule.ARGUMENTS, "all_gather"): 1}),
    ],
)
def test_the_rule_that_made_each_event_communication_is_kept(file: str, rules: dict[tuple[Rule, str], int]) -> None:
    found: dict[tuple[Rule, str | None], int] = {}
    for event in read_trace(FOLDER / file).events:
        if event.rule is not None:
            key = event.rule, event.span.collective
            found[key] = found.get(key, 0) + 1
    assert found == rules
