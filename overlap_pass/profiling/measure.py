"""The same step under several systems, side by side on the devices at hand: time, memory, numbers, traces.

Every rank runs the same number of steps of each system, whatever it measures: all counts are given, none follows from a
clock.
"""

from __future__ import annotations

import gc
import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch._inductor.cudagraph_trees import reset_cudagraph_trees

from overlap_pass.errors import EnvironmentRefused
from overlap_pass.planning import Plan
from overlap_pass.profiling.capture import profile_steps, typical_step
from overlap_pass.profiling.environment import profiler_sees_kernels
from overlap_pass.profiling.numbers import Numbers, agreement, numbers, on_all_ranks, reproducible
from overlap_pass.profiling.plans import recorded_plans
from overlap_pass.profiling.timing import interleaved
from overlap_pass.profiling.variants import Variant
from overlap_pass.profiling.workload import MakeStep, Workload
from overlap_pass.report.comparison import Side
from overlap_pass.report.from_plans import compare_plans
from overlap_pass.report.prediction import Prediction
from overlap_pass.report.verification import Agreement, LeftOut, Measured, SystemKind
from overlap_pass.transport.peers import release_channels, shared_bytes
from overlap_pass.units import format_us

__all__ = ["Effort", "Measurement", "measure"]

Report = Callable[[str], None]
Blocks = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; equal on every rank.

    Attributes:
        warm_up: steps of each system before anything is measured (compilation is in the first).
        rounds, steps: blocks of ``steps`` steps alternate ``rounds`` times.
        profiled: steps in each trace; 0 for no traces.
        numbers: losses and gradients are compared, in builds of their own.
        rehearsal: where there is no GPU, measure on CPUs over gloo: whether a step works, not what is gained.
    """

    warm_up: int = 5
    rounds: int = 6
    steps: int = 4
    profiled: int = 4
    numbers: bool = True
    rehearsal: bool = False


@dataclass(frozen=True)
class Measurement:
    """What :func:`measure` found.

    Attributes:
        systems: those that could be measured, in the order given.
        left_out: those that could not.
        warnings: what could not be looked at.
    """

    systems: tuple[Measured, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


def measure(
    make_step: MakeStep,
    variants: Sequence[Variant],
    effort: Effort,
    *,
    device: torch.device,
    progress: Report = lambda _: None,
    traces: Path | None = None,
) -> Measurement:
    """Build each system once, then time them all in alternating blocks.

    A system that fails while it is built (a peer's pass on a graph that it does not know) is left out on all ranks; a
    scheduled one must not fail.

    Args:
        make_step: called once for each system (and once more for numbers); must build the same each time.
        variants: the systems; the first is the reference for numbers unless a variant names another.
        device: this rank's.
        traces: folder to keep the profiler's traces in, one a system and rank; ``None`` keeps none.
    """
    bench = _Bench(device, effort, progress)
    if effort.numbers:
        for variant in variants:
            bench.attempt(variant, make_step, bench.take_numbers)
    # Every system compiles the same functions: more entries than a user's process would ever have.
    with dynamo_config.patch(recompile_limit=len(variants) * 8):
        for variant in variants:
            bench.attempt(variant, make_step, bench.add)
        blocks = bench.time()
        sides = bench.profile(blocks, traces)
    if device.type == "cuda":
        reset_cudagraph_trees()  # a communicator is not destroyed as long as a recorded graph holds its kernels
    reference = bench.entries[0].variant
    systems = tuple(
        Measured(
            name=entry.variant.name,
            kind=entry.variant.kind,
            blocks_us=taken,
            peak_bytes=entry.peak_bytes,
            reserved_bytes=entry.reserved_bytes,
            agreement=bench.compare(entry.variant, reference),
            bitwise=entry.variant.bitwise_with in bench.numbers,
            noise=bench.noise.get(bench.reference_of(entry.variant, reference), 0.0),
            side=side,
            predicted=entry.prediction(side),
        )
        for entry, taken, side in zip(bench.entries, blocks, sides, strict=True)
    )
    return Measurement(systems, tuple(bench.left_out.values()), tuple(bench.warnings))


@dataclass
class _Entry:
    """One system that is built and warm."""

    variant: Variant
    workload: Workload
    peak_bytes: int
    reserved_bytes: int
    plans: tuple[Plan, ...]

    def prediction(self, side: Side | None) -> Prediction | None:
        if not self.plans:
            return None
        return Prediction.beside(compare_plans(self.plans), None if side is None else side.timeline)


class _Bench:
    """Builds systems one after the other, then measures them side by side."""

    def __init__(self, device: torch.device, effort: Effort, progress: Report) -> None:
        self.device, self.effort, self.progress = device, effort, progress
        self.entries: list[_Entry] = []
        self.numbers: dict[str, Numbers] = {}
        self.noise: dict[str, float] = {}  # how much each system differs from itself, run twice
        self.left_out: dict[str, LeftOut] = {}
        self.warnings: list[str] = []

    def attempt(self, variant: Variant, make_step: MakeStep, build: Callable[[Variant, MakeStep], None]) -> None:
        """Build a system; one that may fail and does is left out, on every rank or on none."""
        if variant.name in self.left_out:
            return
        if variant.kind is SystemKind.SCHEDULED:
            build(variant, make_step)
            return
        reason = ""
        try:
            build(variant, make_step)
        except Exception as error:  # noqa: BLE001  a peer's compiler may raise anything; what, is in the report
            reason = str(error) if isinstance(error, EnvironmentRefused) else _first_line(error)
        if found := _any_reason(reason):
            self.left_out[variant.name] = LeftOut(variant.name, found)
            self.entries = [entry for entry in self.entries if entry.variant is not variant]
            self.numbers.pop(variant.name, None)
            self.progress(f"{variant.name}: left out ({found})")

    def take_numbers(self, variant: Variant, make_step: MakeStep) -> None:
        """Losses and gradients of a build of its own, by deterministic kernels; nothing of it stays."""
        if variant.kind is SystemKind.FLOOR:
            return  # lacks a part of the work, so its gradients are others
        self.progress(f"{variant.name}: losses and gradients, by deterministic kernels")
        with reproducible():
            workload = _build(variant, make_step)
            found = numbers(workload)
            again = on_all_ranks(agreement(variant.name, found, numbers(workload)))
        self.numbers[variant.name] = found
        self.noise[variant.name] = again.worst_relative or 0.0
        del workload
        torch._dynamo.reset()
        _release(self.device)

    def add(self, variant: Variant, make_step: MakeStep) -> None:
        """Build, warm up and take the peak memory, without what the systems before it hold."""
        self.progress(f"{variant.name}: building and compiling")
        _release(self.device)
        held = _Held.now(self.device)
        # A graph out of a cache is not planned, and its prediction would be missing.
        with recorded_plans() as plans, inductor_config.patch(fx_graph_cache=False):
            workload = _build(variant, make_step)
            workload()
            # From the second step on: a CUDA graph allocates when it is recorded, and never again.
            held.restart()
            for _ in range(self.effort.warm_up + 1):
                workload()
        peak_bytes, reserved_bytes = held.peaks()
        self.entries.append(_Entry(variant, workload, peak_bytes, reserved_bytes, tuple(plans)))
        workload.drop_gradients()

    def time(self) -> list[Blocks]:
        self.progress("timing all systems in alternating blocks")
        workloads = [entry.workload for entry in self.entries]
        blocks = interleaved(workloads, self.device, rounds=self.effort.rounds, steps=self.effort.steps)
        # Profiling, and what follows, may not come to its end.
        for entry, taken in zip(self.entries, blocks, strict=True):
            self.progress(f"{entry.variant.name}: {format_us(median(itertools.chain(*taken)))} a step")
        return blocks

    def profile(self, blocks: Sequence[Blocks], traces: Path | None) -> list[Side | None]:
        if self.effort.profiled == 0 or self.device.type != "cuda":
            return [None for _ in self.entries]
        # Not before the timing: a profiler that has run once may slow launches down for good.
        if not profiler_sees_kernels(self.device):
            self.warnings.append(
                "the profiler sees no kernels on some rank, so nothing was profiled: allow it for users "
                "(NVreg_RestrictProfilingToAdminUsers=0), give the container CAP_SYS_ADMIN, or stop other profilers"
            )
            return [None for _ in self.entries]
        sides: list[Side | None] = []
        with tempfile.TemporaryDirectory() as folder:
            for entry, taken in zip(self.entries, blocks, strict=True):
                self.progress(f"{entry.variant.name}: profiling")
                path = (traces or Path(folder)) / f"{_file_name(entry.variant.name)}-rank{dist.get_rank()}.json.gz"
                profile_steps(entry.workload, path, steps=self.effort.profiled)
                timeline = typical_step(path, entry.variant.name)
                samples_us = tuple(step_us for block in taken for step_us in block)
                sides.append(
                    Side.of(entry.variant.name, timeline, peak_bytes=entry.peak_bytes, step_samples_us=samples_us)
                )
        return sides

    def compare(self, variant: Variant, reference: Variant) -> Agreement | None:
        name = self.reference_of(variant, reference)
        if name == variant.name or not {name, variant.name} <= self.numbers.keys():
            return None
        return on_all_ranks(agreement(name, self.numbers[name], self.numbers[variant.name]))

    def reference_of(self, variant: Variant, reference: Variant) -> str:
        """The system whose numbers a variant is held against."""
        return variant.bitwise_with if variant.bitwise_with in self.numbers else reference.name


@dataclass(frozen=True, slots=True)
class _Held:
    """What was held before a system was built, to be taken off its peaks."""

    device: torch.device
    allocated_bytes: int
    reserved_bytes: int
    shared_bytes: int

    @classmethod
    def now(cls, device: torch.device) -> _Held:
        if device.type != "cuda":
            return cls(device, 0, 0, 0)
        release_channels(device)  # the next system makes its own, so that its staging memory is its own
        return cls(
            device, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), shared_bytes(device)
        )

    def restart(self) -> None:
        """Forget peaks so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peaks(self) -> tuple[int, int]:
        """Peak allocated and reserved above what was held, on the rank with the most; zeros without a CUDA device.

        Memory shared with peers is in both: the allocator does not count it.
        """
        if self.device.type != "cuda":
            return 0, 0
        torch.cuda.synchronize()
        staging_bytes = shared_bytes(self.device) - self.shared_bytes
        peaks = torch.tensor(
            [
                torch.cuda.max_memory_allocated(self.device) - self.allocated_bytes + staging_bytes,
                torch.cuda.max_memory_reserved(self.device) - self.reserved_bytes + staging_bytes,
            ],
            device=self.device,
        )
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        allocated_bytes, reserved_bytes = peaks.tolist()
        return int(allocated_bytes), int(reserved_bytes)


def _build(variant: Variant, make_step: MakeStep) -> Workload:
    """One instance of a system, on every rank or, with an error, on none: a rank alone would wait for its peers."""
    model, step, data = make_step()
    run, reason = None, ""
    try:
        run = variant.prepare(model)
    except Exception as error:
        if variant.kind is SystemKind.SCHEDULED:
            raise
        reason = _first_line(error)
    if (found := _any_reason(reason)) or run is None:
        raise EnvironmentRefused(found)
    return Workload(model, run, step, data)


def _file_name(system: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", system).strip("-")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _any_reason(reason: str) -> str:
    """The first rank's reason that has one; the same on all ranks."""
    reasons = [reason] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next(filter(None, reasons), "")


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
