"""Two sets of traces, before and after a change: is the step shorter, where did the time go, and may the two be compared.

The verdict rests on step times alone. More hidden communication is no gain if compute slows down beside it, so the changes of
compute, exposed communication and idle time stand beside the verdict and do not make it.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.table import time_ns
from overlap_pass.traces.figures import Analysis, CollectiveFigures, DeviceFigures

__all__ = ["Difference", "JoinedCollective", "Outcome", "difference"]

NOISE_SHARE = 0.02
"""Steps that differ by less are the same."""

LEAST_COMPARABLE = 0.5
"""Least part of a step's communication, or of its compute, that both sides must share."""


class Outcome(enum.StrEnum):
    IMPROVED = "improved"
    WORSE = "worse"
    NOISE = "within noise"
    NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class JoinedCollective:
    """The same collective on both sides; one that only one side has is not joined."""

    collective: str
    unit: str | None
    payload_bytes: int | None
    before_ns: int
    after_ns: int
    exposed_before_ns: int
    exposed_after_ns: int


@dataclass(frozen=True, slots=True)
class Difference:
    """What changed.

    Attributes:
        outcome: the verdict.
        comparability: part of a step's communication, or of its compute if that is more, that both sides share, from 0.0
            to 1.0.
        steps_before_ns, steps_after_ns: lengths of the steps that count, for each the longest of all ranks.
        noise_ns: what the medians may differ by without meaning anything.
        joined: the largest changes of exposed time first.
        comparison: typical steps of both sides, for the renderers of reports.
    """

    outcome: Outcome
    comparability: float
    steps_before_ns: tuple[int, ...]
    steps_after_ns: tuple[int, ...]
    noise_ns: float
    joined: tuple[JoinedCollective, ...]
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """The form of a comparison report, with what is particular to traces under ``traces``."""
        particular = asdict(self)
        del particular["comparison"]
        return {**self.comparison.to_json(), "traces": {**particular, "outcome": self.outcome.value}}


def difference(before: Analysis, after: Analysis) -> Difference:
    """Compare two analyses of the same work."""
    first, second = _steps_ns(before), _steps_ns(after)
    comparability, reasons = _comparability(before, after)
    noise_ns = max(NOISE_SHARE * median(first), (_spread(first) + _spread(second)) / 2)
    outcome = _outcome(median(second) - median(first), noise_ns, reasons)
    sides = _typical(before), _typical(after)
    comparison = Comparison(
        title=f"{sides[0].path} → {sides[1].path}",
        verdict=_verdict(outcome, first, second, reasons, sides),
        before=Side.of("before", sides[0].step.timeline),
        after=Side.of("after", sides[1].step.timeline),
        notes=tuple(_notes(first, second, noise_ns)),
    )
    return Difference(outcome, comparability, first, second, noise_ns, _joined(*sides), comparison)


def _steps_ns(analysis: Analysis) -> tuple[int, ...]:
    """The length of each step that counts; ranks run in step, so the longest is what a step takes."""
    longest: dict[int | None, int] = {}
    for device in analysis.devices:
        counting = [step for step in device.steps if step.counts] or list(device.steps)
        for step in counting:
            longest[step.number] = max(longest.get(step.number, 0), step.stats.step_ns)
    return tuple(longest.values())


def _spread(steps_ns: Sequence[int]) -> float:
    """Interquartile range; 0 with one step."""
    if len(steps_ns) < 2:
        return 0.0
    first, _, third = quantiles(steps_ns, n=4, method="inclusive")
    return third - first


def _typical(analysis: Analysis) -> DeviceFigures:
    return analysis.slowest


def _outcome(change_ns: float, noise_ns: float, reasons: Sequence[str]) -> Outcome:
    if reasons:
        return Outcome.NOT_COMPARABLE
    if abs(change_ns) <= noise_ns:
        return Outcome.NOISE
    return Outcome.IMPROVED if change_ns < 0 else Outcome.WORSE


def _comparability(before: Analysis, after: Analysis) -> tuple[float, list[str]]:
    """(shared part of the step, why the two cannot be compared).

    The same work may communicate otherwise: in other buckets, over another carrier. Its kernels tell then.
    """
    reasons: list[str] = []
    worlds = [sorted({device.world_size for device in side.devices if device.world_size}) for side in (before, after)]
    if all(worlds) and worlds[0] != worlds[1]:
        reasons.append(
            "world sizes differ ({} before, {} after)".format(*(", ".join(map(str, side)) for side in worlds))
        )
    if len(before.devices) != len(after.devices):
        reasons.append(f"{len(before.devices)} devices before, {len(after.devices)} after")
    whole = [device.step.number is None for device in (*before.devices, *after.devices)]
    if any(whole) and not all(whole):
        reasons.append("one side has steps and the other has none")
    sides = _typical(before), _typical(after)
    communication = _shared(*map(_moved, sides))
    compute = _common(*(side.step.kernels_ns for side in sides))
    shared = max(communication, compute)
    if shared < LEAST_COMPARABLE:
        reasons.append(
            f"only {100 * communication:.0f} % of the communication and {100 * compute:.0f} % of the compute of a step are the same"
        )
    return shared, reasons


def _moved(device: DeviceFigures) -> Counter[str]:
    """Kind of collective → bytes in a step; where sizes are not known, how many."""
    rows = device.step.collectives
    known = all(row.stats.payload_bytes is not None for row in rows)
    moved: Counter[str] = Counter()
    for row in rows:
        moved[row.stats.collective or "unknown"] += (row.stats.payload_bytes or 0) if known else 1
    return moved


def _shared(first: Counter[str], second: Counter[str]) -> float:
    either = (first | second).total()
    return (first & second).total() / either if either else 1.0


def _common(first: Mapping[str, int], second: Mapping[str, int]) -> float:
    """Part of the time of all kernels that those take which both sides run, whatever slows them down on one."""
    total = sum(first.values()) + sum(second.values())
    return sum(first[name] + second[name] for name in first.keys() & second.keys()) / total if total else 0.0


def _verdict(
    outcome: Outcome,
    first: Sequence[int],
    second: Sequence[int],
    reasons: Sequence[str],
    sides: tuple[DeviceFigures, DeviceFigures],
) -> str:
    if reasons:
        return f"Not comparable: {'; '.join(reasons)}."
    before_ns, after_ns = median(first), median(second)
    change = (
        f"{time_ns(round(before_ns))} → {time_ns(round(after_ns))} ({100 * (after_ns / before_ns - 1):+.1f} %)".replace(
            "-", "−"
        )
    )
    stats = sides[0].step.stats, sides[1].step.stats
    parts = ", ".join(
        f"{name} {_signed(getattr(stats[1], field) - getattr(stats[0], field))}"
        for name, field in (("compute", "compute_ns"), ("exposed", "exposed_ns"), ("idle", "idle_ns"))
    )
    return f"{outcome.value.capitalize()}: step {change}; {parts}."


def _signed(change_ns: int) -> str:
    text = time_ns(abs(change_ns))
    return text if text.startswith("0.0 ") else ("+" if change_ns > 0 else "−") + text


def _notes(first: Sequence[int], second: Sequence[int], noise_ns: float) -> Iterable[str]:
    yield (
        f"Medians of {len(first)} and {len(second)} steps, the longest of all ranks in each; differences below {time_ns(round(noise_ns))} "
        "are noise. The table shows the typical step of the slowest rank on each side."
    )
    if min(len(first), len(second)) < 2:
        yield "A single step says nothing about noise: take traces of several."
    yield "Both were measured under the profiler, which slows a CPU-bound step down: confirm with unprofiled steps."


def _joined(before: DeviceFigures, after: DeviceFigures) -> tuple[JoinedCollective, ...]:
    """Joined by kind, module and size, and by order among those that share them."""
    found: dict[tuple[str, str | None, int | None], list[CollectiveFigures]] = defaultdict(list)
    for row in before.step.collectives:
        found[_key(row)].append(row)
    rows: list[JoinedCollective] = []
    for row in after.step.collectives:
        earlier = found[_key(row)]
        if earlier:
            old = earlier.pop(0).stats
            new = row.stats
            rows.append(JoinedCollective(*_key(row), old.duration_ns, new.duration_ns, old.exposed_ns, new.exposed_ns))
    return tuple(sorted(rows, key=lambda row: -abs(row.exposed_after_ns - row.exposed_before_ns)))


def _key(row: CollectiveFigures) -> tuple[str, str | None, int | None]:
    return row.stats.collective or "unknown", row.stats.unit, row.stats.payload_bytes
