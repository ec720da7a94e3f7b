"""``verify``: the same step as written and as scheduled on the user's GPUs, and what to think of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from overlap_pass.config import Config
from overlap_pass.errors import EnvironmentRefused, OptionError
from overlap_pass.profiling.environment import concerns, described
from overlap_pass.profiling.measure import Effort, measure
from overlap_pass.profiling.variants import Variant, baselines, scheduled
from overlap_pass.profiling.workload import MakeStep
from overlap_pass.report.verification import Verification

__all__ = ["AGAINST", "Effort", "check_environment", "require_cuda", "setting", "verify"]

AGAINST = "as-written,fsdp2,fsdp2-compile"

_REHEARSED = "a rehearsal on CPUs over gloo: it shows that the script works, and nothing of what GPUs would gain"

_log = logging.getLogger("overlap_pass.verify")


def verify(
    make_step: MakeStep,
    *,
    against: str | Sequence[Variant] = AGAINST,
    options: Mapping[str, Any] | None = None,
    effort: Effort | None = None,
    apply: Literal["if_faster"] | None = None,
    model: nn.Module | None = None,
) -> Verification:
    """Measure the scheduled step against other systems on the same model, data and GPUs; every rank calls it.

    What is being done is logged by ``overlap_pass.verify``.

    Args:
        make_step: builds model, step and data; called once for each system, and must build the same each time.
        against: systems to compare with, by name or as variants; the first is the reference for numbers unless a variant
            names another.
        options: options of the ``overlap`` backend.
        apply: ``"if_faster"`` compiles ``model`` in place: with the schedule if it is shown to be faster than every
            baseline and its numbers are right, else as the fastest baseline is run (:attr:`Verification.kept`).
        model: the ``fully_shard`` model that will be trained, not compiled yet.

    Returns:
        The same on all ranks but for the traces, which are of each rank's own device.

    Raises:
        EnvironmentRefused: no CUDA (unless this is a rehearsal), no process group or one rank.
        OptionError: an option is not accepted.
    """
    if apply not in (None, "if_faster") or (apply is None) != (model is None):
        raise OptionError(f"apply={apply!r}: write apply='if_faster' together with model=, or neither")
    effort = effort or Effort()
    device = check_environment(rehearsal=effort.rehearsal)
    given = dict(options or {})
    Config.from_options(given)
    variants = (*(baselines(against) if isinstance(against, str) else against), scheduled(given))
    measured = measure(make_step, variants, effort, device=device, progress=_log.info)
    rehearsed = (_REHEARSED,) if device.type == "cpu" else ()
    warnings = (*rehearsed, *concerns(), *measured.warnings)
    found = Verification("Measured step", measured.systems, measured.left_out, warnings, setting(effort, given))
    if model is not None:
        next(variant for variant in variants if variant.name == found.kept).prepare(model)
        _log.info("%s Applied: %s.", found.verdict, found.kept)
    return found


def require_cuda() -> None:
    """Raises EnvironmentRefused where this process sees no CUDA device."""
    if not torch.cuda.is_available():
        raise EnvironmentRefused(
            "verify measures on GPUs and this process sees no CUDA device; --rehearse (or Effort(rehearsal=True)) tries the "
            "script on CPUs, 'overlap-pass demo' plans without a GPU"
        )


def check_environment(*, rehearsal: bool = False) -> torch.device:
    """This rank's GPU, chosen and ready; in a rehearsal without one the CPU.

    Raises:
        EnvironmentRefused: names what is missing and how to get it.
    """
    if not rehearsal:
        require_cuda()
    if not dist.is_initialized():
        raise EnvironmentRefused("verify needs a process group: run it under torchrun --nproc-per-node N with N ≥ 2")
    if dist.get_world_size() < 2:
        raise EnvironmentRefused("verify needs at least 2 ranks (1 found): with one rank nothing is communicated")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def setting(effort: Effort, options: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What the figures were measured on and with, as (name, value) pairs."""
    return (
        *described(),
        ("options", ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults"),
        ("samples", f"{effort.rounds} blocks of {effort.steps} steps a system, alternating"),
    )
