"""``verify``: the same step as written and as scheduled on the user's GPUs, and what to think of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap_pass.config import Config
from overlap_pass.errors import EnvironmentRefused
from overlap_pass.profiling.environment import device_name
from overlap_pass.profiling.measure import Effort, measure
from overlap_pass.profiling.variants import Variant, scheduled
from overlap_pass.profiling.workload import MakeStep
from overlap_pass.report.verification import Verification

__all__ = ["Effort", "check_environment", "require_cuda", "setting", "verify"]

Report = Callable[[str], None]


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
    systems, left_out = measure(make_step, (*against, scheduled(given)), effort, device=device, progress=progress)
    return Verification(title, systems, left_out, setting(effort, given))


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


def setting(effort: Effort, options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the figures were measured on and with, as (name, value) pairs."""
    found = [("hardware", f"{dist.get_world_size()} × {device_name() or 'CPU'}"), ("torch", torch.__version__)]
    if torch.cuda.is_available():
        found.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))  # type: ignore[no-untyped-call]
    return (
        *found,
        ("options", ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"),
        ("samples", f"{effort.rounds} blocks of {effort.steps} steps a system, alternating"),
    )
