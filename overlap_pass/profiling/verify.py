"""``verify``: the same step under several systems, side by side on the user's GPUs: time, memory, numbers, traces."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch.distributed as dist

from overlap_pass.config import Config
from overlap_pass.errors import EnvironmentRefused
from overlap_pass.profiling.capture import profile_steps, typical_step
from overlap_pass.profiling.numbers import Numbers, agreement, numbers, reproducible
from overlap_pass.profiling.timing import interleaved
from overlap_pass.profiling.variants import Variant, scheduled
from overlap_pass.profiling.workload import MakeStep, Workload
from overlap_pass.report.comparison import Side
from overlap_pass.report.verification import Agreement, Measured, Verification

__all__ = ["Effort", "check_environment", "require_cuda", "verify"]

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured; equal on every rank.

    Attributes:
        warm_up: steps of each system before anything is measured (compilation is in the first).
        rounds, steps: blocks of ``steps`` steps alternate ``rounds`` times.
        profiled: steps in each trace; 0 for no traces.
    """

    warm_up: int = 5
    rounds: int = 4
    steps: int = 6
    profiled: int = 4


def verify(
    make_step: MakeStep,
    *,
    against: Sequence[Variant],
    options: Mapping[str, Any] | None = None,
    effort: Effort | None = None,
    title: str = "Measured step",
    progress: Report = lambda _: None,
) -> Verification:
    """Measure the scheduled step against other systems on the same model, data and GPUs.

    Args:
        make_step: builds model, step and data; called once for each system, and must build the same each time.
        against: systems to compare with; the first is the reference for numbers unless a variant names another.
        options: options of the ``overlap`` backend.

    Raises:
        EnvironmentRefused: no CUDA, no process group or one rank.
        OptionError: an option is not accepted.
    """
    effort = effort or Effort()
    device = check_environment()
    given = dict(options or {})
    Config.from_options(given)
    variants = (*against, scheduled(given))
    bench = _Bench(device, effort, progress)
    for variant in variants:
        bench.take_numbers(variant, make_step)
    # Every system compiles the same functions: more entries than a user's process would ever have.
    with dynamo_config.patch(recompile_limit=len(variants) * 8):
        for variant in variants:
            bench.add(variant, make_step)
        samples = bench.time()
        sides = bench.profile(samples)
    systems = tuple(
        Measured(
            name=variant.name,
            side=side,
            step_samples_us=taken,
            peak_bytes=entry.peak_bytes,
            reserved_bytes=entry.reserved_bytes,
            agreement=bench.compare(variant, variants[0]),
            bitwise=variant.bitwise_with in {other.name for other in variants},
            noise=bench.noise[bench.reference_of(variant, variants[0])],
        )
        for variant, entry, taken, side in zip(variants, bench.entries, samples, sides, strict=True)
    )
    return Verification(title, systems, _setting(effort, given))


def require_cuda() -> None:
    """Raises EnvironmentRefused where this process sees no CUDA device."""
    if not torch.cuda.is_available():
        raise EnvironmentRefused(
            "verify measures on GPUs and this process sees no CUDA device; 'overlap-pass demo' plans without one"
        )


def check_environment() -> torch.device:
    """This rank's GPU, chosen and ready.

    Raises:
        EnvironmentRefused: names what is missing and how to get it.
    """
    require_cuda()
    if not dist.is_initialized():
        raise EnvironmentRefused("verify needs a process group: run it under torchrun --nproc-per-node N with N ≥ 2")
    if dist.get_world_size() < 2:
        raise EnvironmentRefused("verify needs at least 2 ranks (1 found): with one rank nothing is communicated")
    return torch.device("cuda", torch.cuda.current_device())


@dataclass
class _Entry:
    """One system that is built and warm."""

    variant: Variant
    workload: Workload
    peak_bytes: int
    reserved_bytes: int


class _Bench:
    """Builds systems one after the other, then measures them side by side."""

    def __init__(self, device: torch.device, effort: Effort, progress: Report) -> None:
        self.device, self.effort, self.progress = device, effort, progress
        self.entries: list[_Entry] = []
        self.numbers: dict[str, Numbers] = {}
        self.noise: dict[str, float] = {}  # how much each system differs from itself, run twice

    def take_numbers(self, variant: Variant, make_step: MakeStep) -> None:
        """Losses and gradients of a build of its own, by deterministic kernels; nothing of it stays."""
        self.progress(f"{variant.name}: losses and gradients, by deterministic kernels")
        with reproducible():
            workload = _build(variant, make_step)
            found = numbers(workload)
            again = agreement(variant.name, found, numbers(workload))
        self.numbers[variant.name] = found
        self.noise[variant.name] = again.worst_relative or 0.0
        del workload
        torch._dynamo.reset()
        _release()

    def add(self, variant: Variant, make_step: MakeStep) -> None:
        """Build, warm up and take the peak memory, without what the systems before it hold."""
        self.progress(f"{variant.name}: building and compiling")
        _release()
        others_bytes = torch.cuda.memory_allocated(self.device)
        others_reserved_bytes = torch.cuda.memory_reserved(self.device)
        workload = _build(variant, make_step)
        for _ in range(self.effort.warm_up):
            workload()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            workload()
        torch.cuda.synchronize()
        self.entries.append(
            _Entry(
                variant=variant,
                workload=workload,
                peak_bytes=torch.cuda.max_memory_allocated(self.device) - others_bytes,
                reserved_bytes=torch.cuda.max_memory_reserved(self.device) - others_reserved_bytes,
            )
        )
        workload.drop_gradients()

    def time(self) -> list[tuple[float, ...]]:
        self.progress("timing all systems in alternating blocks")
        workloads = [entry.workload for entry in self.entries]
        return interleaved(workloads, self.device, rounds=self.effort.rounds, steps=self.effort.steps)

    def profile(self, samples: list[tuple[float, ...]]) -> list[Side | None]:
        if self.effort.profiled == 0:
            return [None for _ in self.entries]
        sides: list[Side | None] = []
        with tempfile.TemporaryDirectory() as folder:
            for entry, taken in zip(self.entries, samples, strict=True):
                self.progress(f"{entry.variant.name}: profiling")
                path = Path(folder) / f"{entry.variant.name}.json.gz"
                profile_steps(entry.workload, path, steps=self.effort.profiled)
                timeline = typical_step(path, entry.variant.name)
                sides.append(Side.of(entry.variant.name, timeline, peak_bytes=entry.peak_bytes, step_samples_us=taken))
        return sides

    def compare(self, variant: Variant, reference: Variant) -> Agreement | None:
        found, name = self.numbers, self.reference_of(variant, reference)
        return None if name == variant.name else agreement(name, found[name], found[variant.name])

    def reference_of(self, variant: Variant, reference: Variant) -> str:
        """The system whose numbers a variant is held against."""
        return variant.bitwise_with if variant.bitwise_with in self.numbers else reference.name


def _build(variant: Variant, make_step: MakeStep) -> Workload:
    model, step, data = make_step()
    return Workload(model, variant.prepare(model), step, data)


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _setting(effort: Effort, options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return (
        ("hardware", f"{dist.get_world_size()} × {torch.cuda.get_device_name()}"),
        ("torch", torch.__version__),
        ("NCCL", nccl),
        ("options", ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"),
        ("samples", f"{effort.rounds} blocks of {effort.steps} steps a system, alternating"),
    )
