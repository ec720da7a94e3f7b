"""What ``verify`` measured: one row for each system, and the verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median, quantiles
from typing import Any

from overlap_pass.errors import PlanError
from overlap_pass.report.comparison import Comparison, Side
from overlap_pass.schedule.types import Decision
from overlap_pass.units import format_us

__all__ = ["SCHEMA", "Agreement", "Measured", "Verification"]

SCHEMA = "overlap-pass/verification/1"

NOISE_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How two systems' losses and gradients compare on one rank.

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


@dataclass(frozen=True)
class Measured:
    """One system.

    Attributes:
        name: what reports call it.
        step_samples_us: unprofiled steps, the slowest rank's each time.
        peak_bytes, reserved_bytes: peak allocated, and reserved by the caching allocator, on this rank.
        agreement: numbers against its reference; ``None`` for the reference itself.
        bitwise: the agreement is required to be exact (same lowering, same order of additions).
        noise: ``worst_relative`` of the reference against itself, run twice; 0.0 where it repeats bit for bit. Where it
            does not, nothing can be asked to equal it bit for bit, and ``bitwise`` asks for an agreement within
            :data:`NOISE_FACTOR` times the noise.
        side: a typical profiled step with its overlap figures; ``None`` if nothing was profiled.
    """

    name: str
    step_samples_us: tuple[float, ...]
    peak_bytes: int
    reserved_bytes: int
    agreement: Agreement | None
    bitwise: bool
    side: Side | None
    noise: float = 0.0

    @property
    def median_us(self) -> float:
        return median(self.step_samples_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        """First and third quartile of the samples."""
        first, _, third = quantiles(self.step_samples_us, n=4, method="inclusive")
        return first, third

    @property
    def wrong(self) -> bool:
        """Numbers differ where they must not, beyond what the reference differs from itself."""
        found = self.agreement
        if not self.bitwise or found is None or found.exact:
            return False
        return found.worst_relative is None or found.worst_relative > NOISE_FACTOR * self.noise

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "step_median_us": self.median_us,
            "step_quartiles_us": list(self.quartiles_us),
            "step_samples_us": list(self.step_samples_us),
            "peak_bytes": self.peak_bytes,
            "reserved_bytes": self.reserved_bytes,
            "bitwise_required": self.bitwise,
            "reference_noise": self.noise,
            "agreement": None if self.agreement is None else asdict(self.agreement),
            "profiled": None if self.side is None else self.side.stats.to_json(),
        }


@dataclass(frozen=True)
class Verification:
    """All systems, the scheduled one last.

    Attributes:
        title: what was measured.
        systems: at least one baseline, then the scheduled system.
        setting: (name, value) pairs: hardware, versions, options, command, date.
        decisions: the moves behind the scheduled system, where this process planned them.
    """

    title: str
    systems: tuple[Measured, ...]
    setting: tuple[tuple[str, str], ...] = ()
    decisions: tuple[Decision, ...] = ()

    @property
    def scheduled(self) -> Measured:
        return self.systems[-1]

    @property
    def best_baseline(self) -> Measured:
        return min(self.systems[:-1], key=lambda system: system.median_us)

    @property
    def keep(self) -> bool:
        """The scheduled step is faster than every baseline, beyond the spread, and its numbers are right.

        Beyond the spread: its third quartile lies below the baseline's first, or at least three quarters of its
        samples lie below the baseline's median (robust to a heavy tail on a shared machine).
        """
        ours, best = self.scheduled, self.best_baseline
        if ours.wrong or ours.median_us >= best.median_us:
            return False
        return ours.quartiles_us[1] < best.median_us

    @property
    def verdict(self) -> str:
        ours, best = self.scheduled, self.best_baseline
        times = f"{format_us(ours.median_us)} a step against {format_us(best.median_us)} of {best.name}"
        change = 100 * (1 - ours.median_us / best.median_us)
        if ours.wrong and ours.agreement is not None:
            return f"DO NOT USE: numbers differ from {ours.agreement.reference}, which must be equal bit for bit."
        if self.keep:
            equal = ours.agreement is not None and ours.agreement.exact
            numbers = "numbers equal bit for bit" if equal else "numbers as close as they can be asked to be"
            return f"Keep the schedule: {times}, {change:.1f} % faster, {numbers}."
        if change > 0:
            return f"No clear gain: {times}, {change:.1f} % faster, within the spread."
        return f"Keep {best.name}: {times}, {-change:.1f} % slower."

    def comparison(self) -> Comparison:
        """The scheduled step beside the best baseline, with timelines.

        Raises:
            PlanError: nothing was profiled.
        """
        before, after = self.best_baseline.side, self.scheduled.side
        if before is None or after is None:
            raise PlanError("no step was profiled, so there is no timeline to show: measure with profiled steps")
        return Comparison(
            title=self.title,
            verdict=self.verdict,
            before=before,
            after=after,
            setting=self.setting,
            decisions=self.decisions,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "title": self.title,
            "verdict": self.verdict,
            "keep": self.keep,
            "setting": [list(pair) for pair in self.setting],
            "systems": [system.to_json() for system in self.systems],
        }
