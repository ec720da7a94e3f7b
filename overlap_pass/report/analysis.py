"""What a report on traces shows: an analysis, its findings, a verdict and what the figures do not cover.

The JSON form is documented in ``docs/analyze.md`` and stable: fields are added, never renamed or given another meaning,
without a new :data:`SCHEMA`. Times are integer nanoseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from overlap_pass.report.table import percent, time_ns
from overlap_pass.traces.advice import LEAST_SHARE, Finding, advise, is_cpu_bound, reorder_bound_ns
from overlap_pass.traces.causes import ExposedCause
from overlap_pass.traces.figures import Analysis, CollectiveFigures, Coverage, DeviceFigures, StepFigures
from overlap_pass.traces.periods import StepSource

__all__ = ["SCHEMA", "AnalysisReport", "dumps", "part", "residual_ns"]

SCHEMA = "overlap-pass/analysis/1"
_MOST_NAMED = 4
_TOLD_BY = {
    StepSource.OPTIMIZER: "a step is from the end of one Optimizer.step to the end of the next",
    StepSource.COLLECTIVES: (
        "a step is one run of the sequence of collectives that repeats, which with gradient accumulation may be a micro-batch"
    ),
}


@dataclass(frozen=True, slots=True)
class AnalysisReport:
    """An analysis with what to think of it.

    Attributes:
        analysis: the figures.
        findings: what to do, most expensive first.
        verdict: one or two sentences on the device with the longest step.
        notes: what the figures do not cover, one sentence each.
    """

    analysis: Analysis
    findings: tuple[Finding, ...]
    verdict: str
    notes: tuple[str, ...]

    @classmethod
    def of(cls, analysis: Analysis) -> AnalysisReport:
        findings = advise(analysis)
        return cls(analysis, findings, _verdict(analysis, findings), tuple(dict.fromkeys(_notes(analysis))))

    @property
    def title(self) -> str:
        """``"2 ranks of 8, 5 steps each"``, ``"num_workers_0.json.gz, 6 steps"``."""
        devices = self.analysis.devices
        counts = sorted({len(device.steps) for device in devices if device.step.number is not None})
        steps = f"{'–'.join(map(str, counts))} step{'s' * (counts != [1])}" if counts else "whole trace"
        if len(devices) == 1:
            world = f" of {devices[0].world_size}" if devices[0].world_size else ""
            return f"{devices[0].label}{world}, {steps}"
        world_size = next((device.world_size for device in devices if device.world_size), None)
        return f"{len(devices)} devices{f' of {world_size}' if world_size else ''}, {steps}"


def part(part_ns: float, step: StepFigures) -> str:
    """A time as part of its step."""
    return percent(100 * part_ns / step.stats.step_ns if step.stats.step_ns else None)


def residual_ns(step: StepFigures) -> int:
    """What ``T_step = T_compute + T_exposed + T_idle`` leaves over: copies that nothing hides."""
    stats = step.stats
    return stats.step_ns - stats.compute_ns - stats.exposed_ns - stats.idle_ns


def _verdict(analysis: Analysis, findings: tuple[Finding, ...]) -> str:
    device = analysis.slowest
    step = device.step
    stats = step.stats
    shares = (
        f"{device.label}, {step.name}: {time_ns(stats.step_ns)} = {part(stats.compute_ns, step)} compute + "
        f"{part(stats.exposed_ns, step)} exposed communication + {part(stats.idle_ns, step)} idle + "
        f"{part(stats.exposed_copy_ns, step)} copies."
    )
    if not findings:
        return f"{shares} Nothing found that costs {100 * LEAST_SHARE:.0f} % of the step or more."
    first = findings[0]
    cost = f"{time_ns(first.cost_ns)} a step, {100 * first.share:.0f} %"
    return f"{shares} First: {first.title} ({cost} on {first.device})."


def _notes(analysis: Analysis) -> Iterator[str]:
    holders: dict[str, list[str]] = {}
    for device in analysis.devices:
        for note in _device_notes(device):
            holders.setdefault(note, []).append(device.label)
    for note, labels in holders.items():
        who = ", ".join(labels) if len(labels) <= _MOST_NAMED else f"{len(labels)} devices"
        yield f"{who}: {note}"
    worlds = sorted({device.world_size for device in analysis.devices if device.world_size})
    if len(worlds) > 1:
        yield f"World sizes differ ({', '.join(map(str, worlds))}): these are not ranks of one run. `overlap-pass compare` compares two."
    labels = [device.label for device in analysis.devices if device.rank is not None]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    if repeated:
        yield f"Several traces are of {', '.join(repeated[:_MOST_NAMED])}: give one of each rank, of the same steps, to see who waits for whom."
    elif analysis.late_ns is None:
        if any(device.step.collectives for device in analysis.devices):
            yield (
                "One trace cannot tell waiting for another rank from transfer: give the traces of all ranks, or exposed "
                "communication may be another rank's fault."
            )
    elif analysis.unmatched:
        yield f"{analysis.unmatched} collectives have no partner in another rank's trace; {analysis.matched} have one."
    if any(analysis.offsets_ns):
        shifts = ", ".join(
            f"{device.label} {offset / 1e6:+.3f} ms".replace("-", "−")
            for device, offset in zip(analysis.devices, analysis.offsets_ns, strict=True)
        )
        yield f"Clocks differ between the files; the ends of collectives were laid together ({shifts}), so waits are estimates."
    yield "The profiler slows the CPU down: judge a change by the times of steps that are not profiled."


def _device_notes(device: DeviceFigures) -> Iterator[str]:
    coverage = device.coverage
    yield from _scope_notes(device)
    yield from _file_notes(coverage)
    if device.step.collectives == () and any(device.rules.values()):
        yield "no collective in the typical step, though there are some in the trace."
    if not device.rules and coverage.issues_collectives:
        yield "the CPU issues collectives, but no device event is known as one: they ran on the CPU, were not recorded, or have new names."
    elif not device.rules:
        yield "no communication was found, so hidden communication has no figure."
    unknown_ns = device.step.exposed[ExposedCause.UNKNOWN]
    if unknown_ns:
        yield f"for {time_ns(unknown_ns)} of the exposed time the launch of the next kernel is not known."
    for step in device.steps:
        if step.launches and step.missing > 0.1 * step.launches:
            yield f"{step.name}: {step.missing} of {step.launches} launched kernels are not in the trace, so it looks idler than it was."


def _scope_notes(device: DeviceFigures) -> Iterator[str]:
    if device.step.number is None:
        yield "the trace has no ProfilerStep and nothing in it repeats as steps do, so the figures are of the whole trace; call profiler.step() for figures of a step."
        return
    if device.coverage.steps_from in _TOLD_BY:
        yield f"the trace has no ProfilerStep; {_TOLD_BY[device.coverage.steps_from]}."
    partial = [step for step in device.steps if step.partial]
    for step in partial:
        kept = (
            "it has next to no work of an earlier step and counts"
            if step.counts
            else "it is left out of the choice of the typical step"
        )
        yield f"{step.name} is partial (no step before it, or the file ends in it); {kept}."
    yield f"shown is {device.step.name}, of median length among {sum(step.counts for step in device.steps) or len(device.steps)}."


def _file_notes(coverage: Coverage) -> Iterator[str]:
    repairs = coverage.repairs
    counted = (
        (
            coverage.unlinked,
            f"of {coverage.events} device events were launched before the trace began: busy time, but of no step",
        ),
        (coverage.in_order, "collectives share no number with their launch; it was told by their order"),
        (coverage.unreadable, "broken events were left out"),
        (coverage.mended, "events were read after their names were mended"),
        (coverage.undecodable, "characters were no UTF-8"),
        (repairs.empty, "device events have no duration and count for nothing"),
        (repairs.clipped, "kernels reached far into the next one of their stream and were cut there"),
        (repairs.capped, "kernels of impossible length were cut at the end of the trace"),
        (
            coverage.repeated,
            "correlations stand for several launches (a file of several processes); the process was guessed",
        ),
        (coverage.graphs, "device events came from CUDA graphs, whose one launch stands for all of them"),
    )
    for count, words in counted:
        if count:
            yield f"{count} {words}."
    if coverage.damage:
        yield f"{coverage.damage}; what was there was read."
    if coverage.silent_steps:
        yield f"no device events in step {', '.join(map(str, coverage.silent_steps[:5]))}{' …' if len(coverage.silent_steps) > 5 else ''}."
    if coverage.overlapping_steps:
        yield "the CPU's marks of steps overlap, as they do with stacks in some versions of torch: boundaries are uncertain."


def dumps(report: AnalysisReport) -> str:
    """Strict JSON, ending in a newline."""
    return json.dumps(to_json(report), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def to_json(report: AnalysisReport) -> dict[str, Any]:
    analysis = report.analysis
    return {
        "schema": SCHEMA,
        "title": report.title,
        "verdict": report.verdict,
        "findings": [asdict(finding) for finding in report.findings],
        "devices": [_device(device) for device in analysis.devices],
        "ranks": None
        if analysis.late_ns is None
        else {
            "late_ns": list(analysis.late_ns),
            "matched": analysis.matched,
            "unmatched": analysis.unmatched,
            "offsets_ns": list(analysis.offsets_ns),
        },
        "notes": list(report.notes),
    }


def _device(device: DeviceFigures) -> dict[str, Any]:
    return {
        "label": device.label,
        "path": device.path,
        "rank": device.rank,
        "world_size": device.world_size,
        "device": device.device,
        "typical": device.typical,
        "reorder_bound_ns": reorder_bound_ns(device),
        "cpu_bound": is_cpu_bound(device.step),
        "slowdown": {"factor": device.slowdown.factor, **asdict(device.slowdown)},
        "rules": {rule.value: count for rule, count in sorted(device.rules.items())},
        "transports": [
            {"collective": collective, "transport": transport.value, "count": count}
            for (collective, transport), count in sorted(device.transports.items())
        ],
        "coverage": asdict(device.coverage),
        "steps": [_step(step, with_collectives=i == device.typical) for i, step in enumerate(device.steps)],
    }


def _step(step: StepFigures, *, with_collectives: bool) -> dict[str, Any]:
    stats = step.stats.to_json()
    del stats["per_collective"]
    return {
        "number": step.number,
        "start_ns": step.start_ns,
        "end_ns": step.end_ns,
        "partial": step.partial,
        "counts": step.counts,
        **stats,
        "residual_ns": residual_ns(step),
        "exposed_by_cause_ns": {cause.value: time for cause, time in step.exposed.items()},
        "idle_by_cause_ns": {cause.value: time for cause, time in step.idle.items()},
        "wait_ns": step.wait_ns,
        "exposed_wait_ns": step.exposed_wait_ns,
        "exposed_transfer_ns": step.exposed_transfer_ns,
        "reorderable_ns": step.reorderable_ns,
        "helper_ns": step.helper_ns,
        "exposed_while_copying_ns": step.copies_hide_ns,
        "launches": step.launches,
        "launches_without_kernel": step.missing,
        "syncs": [asdict(sync) for sync in step.syncs],
        "collectives": [_collective(row) for row in step.collectives] if with_collectives else None,
    }


def _collective(row: CollectiveFigures) -> dict[str, Any]:
    return {
        **asdict(row.stats),
        "rule": row.rule.value,
        "transport": row.transport.value,
        "group": row.group,
        "blocked_ns": row.blocked_ns,
        "late_ns": row.late_ns,
        "wait_ns": row.wait_ns,
        "transfer_ns": row.transfer_ns,
        "shares_lane": row.shares_lane,
    }
