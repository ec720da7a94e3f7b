"""What ``verify`` measured: one row for each system, and the verdict."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from overlap_pass.errors import PlanError
from overlap_pass.report.causes import causes
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.report.prediction import Prediction
from overlap_pass.report.significance import CONFIDENCE, Interval, least_rounds, location, ratio
from overlap_pass.units import format_bytes, format_us

__all__ = ["SCHEMA", "Agreement", "LeftOut", "Measured", "Outcome", "SystemKind", "Verification"]

SCHEMA = "overlap-pass/verification/2"

NOISE_FACTOR = 3.0


class SystemKind(enum.StrEnum):
    """What a system is measured for."""

    BASELINE = "baseline"
    """To be beaten."""
    SCHEDULED = "scheduled"
    """Ours."""
    FLOOR = "floor"
    """Work that lacks a part, as a measure of what is left: it beats nobody."""


class Outcome(enum.StrEnum):
    """What the measured steps show of the schedule, against the fastest baseline."""

    WRONG = "wrong"
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference shown"


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two systems' losses and gradients compare, over the shards of all ranks.

    Attributes:
        reference: name of the system compared with.
        losses_equal: all losses are equal bit for bit.
        gradients, gradients_equal: number of gradient shards, and of those equal bit for bit.
        worst_relative: largest ``‖a − b‖ / ‖b‖`` over the gradient shards (0.0 if all are equal); ``None`` where a
            system lacks a gradient that the other has.
        worst_parameter: the parameter where it is.
    """

    reference: str
    losses_equal: bool
    gradients: int
    gradients_equal: int
    worst_relative: float | None
    worst_parameter: str

    @property
    def exact(self) -> bool:
        return self.losses_equal and self.gradients == self.gradients_equal


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A system that could not be measured, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Measured:
    """One system.

    Attributes:
        name: what reports call it.
        kind: what it is measured for.
        blocks_us: for each round the unprofiled steps of this system, the slowest rank's each time.
        peak_bytes, reserved_bytes: peak allocated, and reserved by the caching allocator, on the rank with the most;
            0 on a device that keeps no count.
        agreement: numbers against its reference; ``None`` for the reference itself and where none were taken.
        bitwise: the agreement is required to be exact (same lowering, same order of additions).
        noise: ``worst_relative`` of the reference against itself, run twice; 0.0 where it repeats bit for bit. Where it
            does not, nothing can be asked to equal it bit for bit, and ``bitwise`` asks for an agreement within
            :data:`NOISE_FACTOR` times the noise.
        side: a typical profiled step with its overlap figures; ``None`` if nothing was profiled.
        predicted: what was planned for it; ``None`` where this process did not plan it.
    """

    name: str
    kind: SystemKind
    blocks_us: tuple[tuple[float, ...], ...]
    peak_bytes: int
    reserved_bytes: int
    agreement: Agreement | None = None
    bitwise: bool = False
    noise: float = 0.0
    side: Side | None = None
    predicted: Prediction | None = None

    @property
    def step_samples_us(self) -> tuple[float, ...]:
        return tuple(step_us for block in self.blocks_us for step_us in block)

    @property
    def median_us(self) -> float:
        return median(self.step_samples_us)

    @property
    def interval_us(self) -> Interval:
        """Where the system's block medians lie."""
        return location([median(block) for block in self.blocks_us])

    @property
    def wrong(self) -> bool:
        """Numbers differ where they must not, beyond what the reference differs from itself."""
        found = self.agreement
        if not self.bitwise or found is None or found.exact:
            return False
        return found.worst_relative is None or found.worst_relative > NOISE_FACTOR * self.noise

    @property
    def prediction_lines(self) -> tuple[str, ...]:
        """What was predicted beside what was measured; empty without a prediction."""
        if self.predicted is None:
            return ()
        return (*self.predicted.lines(self.median_us, self.side, self.peak_bytes), *self._over_budget)

    @property
    def _over_budget(self) -> tuple[str, ...]:
        """Memory above the budget: what the step allocated, or what the allocator reserved for it."""
        budget_bytes = None if self.predicted is None else self.predicted.budget_bytes
        if budget_bytes is None or max(self.peak_bytes, self.reserved_bytes) <= budget_bytes:
            return ()
        above = f"above the budget of {format_bytes(budget_bytes)}"
        if self.peak_bytes > budget_bytes:
            return (f"OVER BUDGET: {format_bytes(self.peak_bytes)} allocated, {above}",)
        return (
            f"OVER BUDGET in reserved memory: {format_bytes(self.reserved_bytes)}, {above}, though no more than "
            f"{format_bytes(self.peak_bytes)} was allocated at once; the caching allocator keeps the rest: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind.value,
            "step_median_us": self.median_us,
            "step_interval_us": asdict(self.interval_us),
            "step_blocks_us": [list(block) for block in self.blocks_us],
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "bitwise_required": self.bitwise,
            "reference_noise": self.noise,
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "profiled": None if self.side is None else self.side.stats.to_json(),
            "predicted": None if self.predicted is None else self.predicted.to_json(),
        }


@dataclass(frozen=True)
class Verification:
    """All systems.

    Attributes:
        title: what was measured.
        systems: at least one baseline and one scheduled system.
        left_out: systems that were asked for and failed.
        warnings: what about the environment speaks against these figures or against a gain.
        setting: (name, value) pairs: hardware, versions, options, command, date.
    """

    title: str
    systems: tuple[Measured, ...]
    left_out: tuple[LeftOut, ...] = ()
    warnings: tuple[str, ...] = ()
    setting: tuple[tuple[str, str], ...] = ()

    @property
    def scheduled(self) -> Measured:
        """The fastest of the scheduled systems."""
        return self._fastest(SystemKind.SCHEDULED)

    @property
    def best_baseline(self) -> Measured:
        return self._fastest(SystemKind.BASELINE)

    def _fastest(self, kind: SystemKind) -> Measured:
        return min((system for system in self.systems if system.kind is kind), key=lambda system: system.median_us)

    @property
    def change(self) -> Interval:
        """How many times as long a scheduled step takes as one of the best baseline."""
        return ratio(self.scheduled.blocks_us, self.best_baseline.blocks_us)

    @property
    def outcome(self) -> Outcome:
        """A difference counts where the whole interval lies on one side and has the confidence asked for."""
        change = self.change
        if self.scheduled.wrong:
            return Outcome.WRONG
        if change.conclusive and change.high < 1:
            return Outcome.FASTER
        if change.conclusive and change.low > 1:
            return Outcome.SLOWER
        return Outcome.NO_DIFFERENCE

    @property
    def keep(self) -> bool:
        """The scheduled step is faster than the best baseline, and its numbers are right."""
        return self.outcome is Outcome.FASTER

    @property
    def kept(self) -> str:
        """Name of the system to use."""
        return (self.scheduled if self.keep else self.best_baseline).name

    @property
    def verdict(self) -> str:
        ours, best, change = self.scheduled, self.best_baseline, self.change
        times = f"{format_us(ours.median_us)} a step against {format_us(best.median_us)} of {best.name}"
        match self.outcome:
            case Outcome.WRONG:
                reference = ours.agreement.reference if ours.agreement is not None else best.name
                return f"DO NOT USE: numbers differ from {reference}, which must be equal bit for bit."
            case Outcome.FASTER:
                return f"Keep the schedule: {times}, {_percent(change, faster=True)} faster, {_numbers(ours)}."
            case Outcome.SLOWER:
                return f"Keep {best.name}: {times}, {_percent(change, faster=False)} slower."
        if not change.conclusive:
            return (
                f"No difference shown: {times}; {len(ours.blocks_us)} rounds give {100 * change.confidence:.0f} % "
                f"confidence at most, {100 * CONFIDENCE:.0f} % takes {least_rounds()}."
            )
        faster = change.value < 1
        words = "faster" if faster else "slower"
        return f"No difference shown: {times}, {_percent(change, faster=faster)} {words}, which may be chance."

    @property
    def causes(self) -> tuple[str, ...]:
        """Why there is no gain; empty where there is one, and where nothing was profiled."""
        before, after = self.best_baseline.side, self.scheduled.side
        if self.outcome in (Outcome.FASTER, Outcome.WRONG) or before is None or after is None:
            return ()
        return (*causes(before, after), *(f"environment: {warning}" for warning in self.warnings))

    def comparison(self) -> Comparison:
        """The scheduled step beside the best baseline, with timelines.

        Raises:
            PlanError: nothing was profiled.
        """
        before, after = self.best_baseline.side, self.scheduled.side
        if before is None or after is None:
            raise PlanError("no step was profiled, so there is no timeline to show: measure with profiled steps")
        predicted = self.scheduled.predicted
        return Comparison(
            title=self.title,
            verdict=self.verdict,
            before=before,
            after=after,
            setting=self.setting,
            budget_bytes=None if predicted is None else predicted.budget_bytes,
            decisions=() if predicted is None else predicted.decisions,
            notes=(*self.causes, *self.scheduled.prediction_lines, *self.warnings),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "title": self.title,
            "verdict": self.verdict,
            "outcome": self.outcome.value,
            "keep": self.keep,
            "change": asdict(self.change),
            "setting": [list(pair) for pair in self.setting],
            "systems": [system.to_json() for system in self.systems],
            "left_out": [asdict(system) for system in self.left_out],
            "causes": list(self.causes),
            "warnings": list(self.warnings),
        }


def _percent(change: Interval, *, faster: bool) -> str:
    """``9.0 % (8.1 to 9.9)``: the change and its interval, counted in one direction."""
    sign = -1 if faster else 1
    value, *ends = (sign * 100 * (ratio - 1) for ratio in (change.value, change.low, change.high))
    low, high = sorted(ends)
    return f"{value:.1f} % ({low:.1f} to {high:.1f})".replace("-", "−")


def _numbers(system: Measured) -> str:
    if system.agreement is None:
        return "numbers not compared"
    return "numbers equal bit for bit" if system.agreement.exact else "numbers as close as they can be asked to be"
