"""Causes, waits and single collectives of real traces, against figures found by other means.

The traces are third-party files and not part of the project: where ``../shared/traces`` is absent, these tests skip.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from overlap_pass.timeline.intervals import total_ns
from overlap_pass.timeline.stats import CollectiveStats, measure
from overlap_pass.traces.activity import Activities
from overlap_pass.traces.advice import advise, is_cpu_bound
from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import Capture, read_trace, whole
from overlap_pass.traces.causes import Causes, find_causes
from overlap_pass.traces.collectives import Transport
from overlap_pass.traces.figures import Analysis

FOLDER = Path(__file__).parents[3] / "shared" / "traces"

pytestmark = pytest.mark.skipif(
    not FOLDER.exists(), reason="no reference traces beside the checkout (../shared/traces)"
)

NCCLARGS = "hta-a100x2-ncclargs/rank-0.json.gz"
CONTROL = "hta-a100x8-diffcontrol/rank-3.json.gz"
TEST = "hta-v100x2-difftest/rank-1.json.gz"
B200 = "tracelens-b200x8-eager/rank-0.json.gz"
LOADER = "kineto-v100x1-dataloader/num_workers_{}.json.gz"
MEGATRON = ("megatron-v100x2-tp2/rank-0.json.gz", "megatron-v100x2-tp2/rank-1.json.gz")


@cache
def capture(file: str) -> Capture:
    return read_trace(FOLDER / file)


@cache
def analysis(*files: str) -> Analysis:
    return analyse([capture(file) for file in files])


def causes(file: str) -> Causes:
    """From the first to the last thing that the device ran, as the reference counts."""
    found = capture(file)
    window = found.events[0].span.start_ns, max(event.span.end_ns for event in found.events)
    return find_causes(found.events, window, Activities(found.file))


@pytest.mark.parametrize(
    ("file", "blocked_ms", "late_ms"),
    [(NCCLARGS, 2.0, 37.6), (CONTROL, 70.5, 17.4), (TEST, 70.5, 0.3), (B200, 0.03, 2.09)],
)
def test_exposed_time_is_blocked_or_late_as_the_reference_says(file: str, blocked_ms: float, late_ms: float) -> None:
    """The reference prints two digits at least."""
    found = {cause.value: total_ns(times) / 1e6 for cause, times in causes(file).exposed.items()}
    assert found["blocked"] == pytest.approx(blocked_ms, abs=0.05 if blocked_ms > 1 else 0.005)
    assert found["late"] == pytest.approx(late_ms, abs=0.05 if late_ms > 2.1 or late_ms < 1 else 0.005)


@pytest.mark.parametrize(("workers", "waits_ms"), [(0, 163.8), (4, 0.0)])
def test_workers_take_the_wait_for_data_away(workers: int, waits_ms: float) -> None:
    found = {cause.value: total_ns(times) / 1e6 for cause, times in causes(LOADER.format(workers)).idle.items()}
    assert found["loader"] == pytest.approx(waits_ms, abs=0.05)


def test_one_rank_waits_for_the_other_and_next_to_nothing_is_transfer() -> None:
    found = analysis(*MEGATRON)
    first, second = (device.step for device in found.devices)
    assert first.wait_ns == 0
    assert second.wait_ns is not None
    assert second.wait_ns / 1000 == pytest.approx(48198.1, abs=0.05)
    assert (second.stats.communication_ns - second.wait_ns) / 1000 == pytest.approx(229.9, abs=0.05)
    assert (found.matched, found.unmatched, found.offsets_ns) == (26, 0, (0, 0))
    straggler = next(finding for finding in advise(found) if finding.kind == "straggler")
    assert straggler.title == "rank 1 waits for rank 0"


def by_kind(file: str) -> dict[str, list[CollectiveStats]]:
    rows: dict[str, list[CollectiveStats]] = defaultdict(list)
    for row in measure(whole(capture(file))).per_collective:
        rows["send_recv" if "SendRecv" in row.name else str(row.collective)].append(row)
    return rows


@pytest.mark.parametrize(
    ("file", "kind", "count", "taken_us", "exposed_us"),
    [
        (NCCLARGS, "all_reduce", 15, 46762.2, 39445.1),
        (NCCLARGS, "broadcast", 6, 114.3, 114.3),
        (CONTROL, "send_recv", 42, 130655, 83443),
        (CONTROL, "all_reduce", 18, 32880, 4478),
    ],
)
def test_each_kind_of_collective_is_exposed_as_the_reference_says(
    file: str, kind: str, count: int, taken_us: float, exposed_us: float
) -> None:
    rows = by_kind(file)[kind]
    assert len(rows) == count
    assert sum(row.duration_ns for row in rows) / 1000 == pytest.approx(taken_us, abs=0.06)
    assert sum(row.exposed_ns for row in rows) / 1000 == pytest.approx(exposed_us, abs=0.06)


@pytest.mark.parametrize(
    ("position", "taken_ns", "exposed_ns"), [(2, 3_306_963, 2_849_303), (17, 5_983_024, 4_510_434)]
)
def test_single_collectives_are_exposed_to_the_nanosecond(position: int, taken_ns: int, exposed_ns: int) -> None:
    row = measure(whole(capture(NCCLARGS))).per_collective[position]
    assert (row.duration_ns, row.exposed_ns) == (taken_ns, exposed_ns)


def test_compute_slows_down_beside_collectives_as_the_reference_says() -> None:
    factor = analysis(CONTROL).devices[0].slowdown.factor
    assert factor == pytest.approx(1.62, abs=0.005)


def test_symmetric_memory_kernels_are_communication_on_the_stream_that_computes() -> None:
    device = analysis(B200).devices[0]
    assert device.transports == {("all_reduce", Transport.SYMMETRIC): 73, ("all_gather", Transport.RING): 1}
    assert all(row.shares_lane for row in device.step.collectives)
    assert device.step.reorderable_ns == 0


@pytest.mark.parametrize("file", [NCCLARGS, B200, LOADER.format(4)])
def test_steps_that_wait_for_the_cpu_are_told_so_first_and_never_to_prefetch(file: str) -> None:
    found = analysis(file)
    assert is_cpu_bound(found.devices[0].step)
    findings = advise(found)
    assert findings[0].kind == "cpu"
    assert not any(finding.kind.startswith("blocked") for finding in findings)


def test_the_data_bound_run_is_told_so_first() -> None:
    assert advise(analysis(LOADER.format(0)))[0].kind == "dataloader"


@pytest.mark.parametrize("file", [NCCLARGS, CONTROL, TEST, B200, LOADER.format(0), *MEGATRON])
def test_every_step_adds_up(file: str) -> None:
    for step in analysis(file).devices[0].steps:
        stats = step.stats
        assert stats.compute_ns + stats.exposed_ns + stats.exposed_copy_ns + stats.idle_ns == stats.step_ns
        assert sum(step.exposed.values()) == stats.exposed_ns
        assert sum(step.idle.values()) == stats.idle_ns
        assert sum(row.stats.exposed_share_ns for row in step.collectives) == pytest.approx(stats.exposed_ns)
