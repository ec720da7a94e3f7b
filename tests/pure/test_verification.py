"""What ``verify`` concludes from what it measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from overlap_pass.errors import PlanError
from overlap_pass.report import verification_text
from overlap_pass.report.comparison import Side
from overlap_pass.report.prediction import Prediction
from overlap_pass.report.verification import Agreement, LeftOut, Measured, Outcome, SystemKind, Verification
from overlap_pass.timeline.spans import Span, SpanKind, Timeline

EXACT = Agreement("as-written", True, 10, 10, 0.0, "")
WRONG = Agreement("as-written", True, 10, 9, 1e-3, "blocks.0.weight")


def measured(
    name: str,
    *block_ms: float,
    kind: SystemKind = SystemKind.BASELINE,
    agreement: Agreement | None = EXACT,
    bitwise: bool = False,
) -> Measured:
    """A system with one step in each block."""
    samples = tuple(1000.0 * value for value in block_ms)
    spans = (
        Span("gemm", SpanKind.COMPUTE, "stream 7", 0, 80),
        Span("ag", SpanKind.COMMUNICATION, "stream 20", 70, 100),
    )
    side = Side.of(name, Timeline(name, 100, spans, predicted=False), peak_bytes=2**30, step_samples_us=samples)
    return Measured(name, kind, tuple((one,) for one in samples), 2**30, 2**31, agreement, bitwise, side=side)


def ours(*block_ms: float, agreement: Agreement | None = EXACT, bitwise: bool = False) -> Measured:
    return measured("overlap", *block_ms, kind=SystemKind.SCHEDULED, agreement=agreement, bitwise=bitwise)


def verification(*systems: Measured) -> Verification:
    return Verification("a step", systems, setting=(("hardware", "2 GPUs"),))


BASELINE = measured("as-written", 110, 111, 112, 113, 114, 115, agreement=None)
FASTER = (99, 99.9, 100.8, 101.7, 102.6, 103.5)  # each 10 % below the baseline's block


def test_a_step_that_is_faster_in_every_round_is_kept() -> None:
    found = verification(BASELINE, ours(*FASTER, bitwise=True))
    assert found.keep
    assert (found.outcome, found.kept) == (Outcome.FASTER, "overlap")
    assert found.verdict == (
        "Keep the schedule: 101.2 ms a step against 112.5 ms of as-written, 10.0 % (10.0 to 10.0) faster, "
        "numbers equal bit for bit."
    )


def test_the_fastest_baseline_is_the_one_to_beat() -> None:
    found = verification(BASELINE, measured("fsdp2", 90, 91, 92, 93, 94, 95), ours(*FASTER))
    assert found.best_baseline.name == "fsdp2"
    assert (found.outcome, found.kept) == (Outcome.SLOWER, "fsdp2")
    assert found.verdict.startswith("Keep fsdp2: ")


def test_a_floor_is_nothing_to_beat() -> None:
    floor = measured("compute-only", 80, 80, 80, 80, 80, 80, kind=SystemKind.FLOOR)
    assert verification(BASELINE, floor, ours(*FASTER)).best_baseline.name == "as-written"


def test_of_several_schedules_the_fastest_counts() -> None:
    other = measured("overlap; coalesce=off", 90, 91, 92, 93, 94, 95, kind=SystemKind.SCHEDULED)
    assert verification(BASELINE, ours(*FASTER), other).scheduled is other


def test_a_gain_in_some_rounds_and_a_loss_in_others_shows_nothing() -> None:
    found = verification(BASELINE, ours(100, 121, 101, 125, 103, 126))
    assert (found.outcome, found.kept) == (Outcome.NO_DIFFERENCE, "as-written")
    assert found.verdict.startswith("No difference shown: ")


def test_too_few_rounds_show_nothing_however_fast_they_were() -> None:
    found = verification(measured("as-written", 110, 111, 112), ours(50, 51, 52))
    assert found.outcome is Outcome.NO_DIFFERENCE
    assert "3 rounds give 75 % confidence at most, 95 % takes 6" in found.verdict


def test_wrong_numbers_outweigh_any_speed() -> None:
    found = verification(BASELINE, ours(50, 51, 52, 53, 54, 55, agreement=WRONG, bitwise=True))
    assert not found.keep
    assert found.verdict == "DO NOT USE: numbers differ from as-written, which must be equal bit for bit."


def test_numbers_within_the_references_own_noise_are_not_wrong() -> None:
    """The reference differs from itself by 1e-3 from run to run: a difference of 1e-3 shows nothing, one of 1e-2 does."""
    noisy = replace(ours(*FASTER, agreement=WRONG, bitwise=True), noise=1e-3)
    found = verification(BASELINE, noisy)
    assert found.keep
    assert found.verdict.endswith("numbers as close as they can be asked to be.")
    beyond = replace(noisy, agreement=replace(WRONG, worst_relative=1e-2))
    assert verification(BASELINE, beyond).verdict.startswith("DO NOT USE")


def test_numbers_that_need_not_be_equal_do_not_stop_it() -> None:
    found = verification(BASELINE, ours(*FASTER, agreement=WRONG, bitwise=False))
    assert found.keep


def test_a_missing_gradient_is_not_exact() -> None:
    assert not Agreement("fsdp2", True, 10, 9, None, "blocks.1.weight").exact


def test_memory_above_the_budget_is_flagged_in_reserved_memory_too() -> None:
    """B30: the allocator may hold what no tensor does. 1 GiB is allocated at most here, and 2 GiB reserved."""
    told: dict[int | None, list[str]] = {}
    for budget_bytes in (2**30 // 2, 3 * 2**29, 2**31, None):
        system = ours(*FASTER)
        assert system.side is not None
        system = replace(system, predicted=Prediction(system.side, budget_bytes))
        told[budget_bytes] = [line for line in verification(BASELINE, system).comparison().notes if "OVER" in line]
    assert told[2**30 // 2] == ["OVER BUDGET: 1.00 GiB allocated, above the budget of 512 MiB"]
    (reserved,) = told[3 * 2**29]
    assert reserved.startswith(
        "OVER BUDGET in reserved memory: 2.00 GiB, above the budget of 1.50 GiB, though no more than 1.00 GiB"
    )
    assert told[2**31] == told[None] == []


def test_the_comparison_sets_the_schedule_beside_the_best_baseline() -> None:
    comparison = verification(BASELINE, ours(*FASTER)).comparison()
    assert (comparison.before.label, comparison.after.label) == ("as-written", "overlap")
    assert comparison.after.step_median_us == pytest.approx(101_250)


def test_without_a_profiled_step_there_is_no_page() -> None:
    blind = Measured("overlap", SystemKind.SCHEDULED, BASELINE.blocks_us, 1, 1)
    with pytest.raises(PlanError, match="no step was profiled"):
        verification(BASELINE, blind).comparison()


def test_the_record_is_json_with_every_sample() -> None:
    data = json.loads(json.dumps(verification(BASELINE, ours(*FASTER)).to_json()))
    assert data["schema"] == "overlap-pass/verification/2"
    assert [system["name"] for system in data["systems"]] == ["as-written", "overlap"]
    assert data["systems"][1]["step_blocks_us"] == [[1000 * value] for value in FASTER]
    assert data["systems"][1]["profiled"]["exposed_ns"] == 20


def test_the_text_names_every_system_and_marks_wrong_numbers() -> None:
    wrong = ours(*FASTER, agreement=WRONG, bitwise=True)
    text = verification_text.render(verification(BASELINE, wrong))
    assert "as-written" in text
    assert "reference" in text
    assert "WRONG ±1.0e-03 as-written" in text
    assert "hardware: 2 GPUs" in text


def test_what_could_not_be_measured_is_named_with_the_reason() -> None:
    left = LeftOut("torch-overlap", "ImportError: no such pass")
    found = Verification("a step", (BASELINE, ours(*FASTER)), (left,))
    assert "left out: torch-overlap (ImportError: no such pass)" in verification_text.render(found)
    assert found.to_json()["left_out"] == [{"name": "torch-overlap", "reason": "ImportError: no such pass"}]
