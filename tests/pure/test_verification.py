"""What ``verify`` concludes from what it measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from overlap_pass.errors import PlanError
from overlap_pass.report import verification_text
from overlap_pass.report.comparison import Side
from overlap_pass.report.verification import Agreement, Measured, Verification
from overlap_pass.timeline.spans import Span, SpanKind, Timeline

EXACT = Agreement("as-written", True, 10, 10, 0.0, "")
WRONG = Agreement("as-written", True, 10, 9, 1e-3, "blocks.0.weight")


def measured(name: str, *step_ms: float, agreement: Agreement | None = EXACT, bitwise: bool = False) -> Measured:
    samples = tuple(1000.0 * value for value in step_ms)
    spans = (
        Span("gemm", SpanKind.COMPUTE, "stream 7", 0, 80),
        Span("ag", SpanKind.COMMUNICATION, "stream 20", 70, 100),
    )
    side = Side.of(name, Timeline(name, 100, spans, predicted=False), peak_bytes=2**30, step_samples_us=samples)
    return Measured(name, samples, 2**30, 2**31, agreement, bitwise, side)


def verification(*systems: Measured) -> Verification:
    return Verification("a step", systems, setting=(("hardware", "2 GPUs"),))


BASELINE = measured("as-written", 110, 111, 112, 113, agreement=None)


def test_a_step_that_is_faster_beyond_the_spread_is_kept() -> None:
    found = verification(BASELINE, measured("overlap", 100, 101, 102, 103, bitwise=True))
    assert found.keep
    assert found.verdict == (
        "Keep the schedule: 101.5 ms a step against 111.5 ms of as-written, 9.0 % faster, numbers equal bit for bit."
    )


def test_the_fastest_baseline_is_the_one_to_beat() -> None:
    found = verification(BASELINE, measured("fsdp2", 90, 91, 92, 93), measured("overlap", 100, 101, 102, 103))
    assert found.best_baseline.name == "fsdp2"
    assert not found.keep
    assert found.verdict.startswith("Keep fsdp2: ")


def test_a_gain_within_the_spread_is_no_gain() -> None:
    found = verification(BASELINE, measured("overlap", 105, 110, 113, 114))
    assert not found.keep
    assert "within the spread" in found.verdict or found.verdict.startswith("Keep as-written")


def test_wrong_numbers_outweigh_any_speed() -> None:
    found = verification(BASELINE, measured("overlap", 50, 51, 52, 53, agreement=WRONG, bitwise=True))
    assert not found.keep
    assert found.verdict == "DO NOT USE: numbers differ from as-written, which must be equal bit for bit."


def test_numbers_within_the_references_own_noise_are_not_wrong() -> None:
    """The reference differs from itself by 1e-3 from run to run: a difference of 1e-3 shows nothing, one of 1e-2 does."""
    noisy = replace(measured("overlap", 100, 101, 102, 103, agreement=WRONG, bitwise=True), noise=1e-3)
    found = verification(BASELINE, noisy)
    assert found.keep
    assert found.verdict.endswith("numbers as close as they can be asked to be.")
    beyond = replace(noisy, agreement=replace(WRONG, worst_relative=1e-2))
    assert verification(BASELINE, beyond).verdict.startswith("DO NOT USE")


def test_numbers_that_need_not_be_equal_do_not_stop_it() -> None:
    found = verification(BASELINE, measured("overlap", 100, 101, 102, 103, agreement=WRONG, bitwise=False))
    assert found.keep


def test_a_missing_gradient_is_not_exact() -> None:
    assert not Agreement("fsdp2", True, 10, 9, None, "blocks.1.weight").exact


def test_the_comparison_sets_the_schedule_beside_the_best_baseline() -> None:
    comparison = verification(BASELINE, measured("overlap", 100, 101, 102, 103)).comparison()
    assert (comparison.before.label, comparison.after.label) == ("as-written", "overlap")
    assert comparison.after.step_median_us == pytest.approx(101_500)


def test_without_a_profiled_step_there_is_no_page() -> None:
    blind = Measured("overlap", (1.0, 2.0), 1, 1, None, False, None)
    with pytest.raises(PlanError, match="no step was profiled"):
        verification(BASELINE, blind).comparison()


def test_the_record_is_json_with_every_sample() -> None:
    data = json.loads(json.dumps(verification(BASELINE, measured("overlap", 100, 101, 102, 103)).to_json()))
    assert data["schema"] == "overlap-pass/verification/1"
    assert [system["name"] for system in data["systems"]] == ["as-written", "overlap"]
    assert data["systems"][1]["step_samples_us"] == [100_000, 101_000, 102_000, 103_000]
    assert data["systems"][1]["profiled"]["exposed_ns"] == 20


def test_the_text_names_every_system_and_marks_wrong_numbers() -> None:
    wrong = measured("overlap", 100, 101, 102, 103, agreement=WRONG, bitwise=True)
    text = verification_text.render(verification(BASELINE, wrong))
    assert "as-written" in text
    assert "reference" in text
    assert "WRONG ±1.0e-03 as-written" in text
    assert "hardware: 2 GPUs" in text
