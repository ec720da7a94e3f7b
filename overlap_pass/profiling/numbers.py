"""Losses and gradients of a step, kept for comparison, and how well two systems agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from overlap_pass.profiling.workload import Workload
from overlap_pass.report.verification import Agreement

__all__ = ["Numbers", "agreement", "numbers", "on_all_ranks", "reproducible"]

_STEPS = 2


@dataclass(frozen=True)
class Numbers:
    """Losses of the first steps, and this rank's gradient shards of the last of them, on the CPU."""

    losses: tuple[torch.Tensor, ...]
    gradients: dict[str, torch.Tensor]


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Whatever is built and run in here gives the same bits every time.

    Three sources of noise have nothing to do with the schedule and are shut off: kernels that add with atomics where torch
    has others (embedding backward), fused attention, whose backward differs from itself from run to run (cuDNN's has no
    deterministic form; flash attention has one, but not while torch is told only to warn), and Inductor's choice
    among kernel configurations by stopwatch, which changes the order of additions from one compilation to the next.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with inductor_config.patch(deterministic=True), sdpa_kernel([SDPBackend.MATH]):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def numbers(workload: Workload) -> Numbers:
    """Run two steps of a workload and keep what they return."""
    losses = tuple(workload().detach().float().cpu() for _ in range(_STEPS))
    gradients = {
        _plain_name(name): _local(parameter.grad).detach().cpu()
        for name, parameter in workload.model.named_parameters()
        if parameter.grad is not None
    }
    return Numbers(losses, gradients)


def agreement(reference: str, expected: Numbers, found: Numbers) -> Agreement:
    """Compare two systems on this rank."""
    names = sorted(expected.gradients.keys() | found.gradients.keys())
    errors = {name: _relative(expected.gradients.get(name), found.gradients.get(name)) for name in names}
    missing = next((name for name, error in errors.items() if error is None), None)
    where = missing or max(errors, key=lambda name: errors[name] or 0.0, default="")
    return Agreement(
        reference=reference,
        losses_equal=all(torch.equal(a, b) for a, b in zip(expected.losses, found.losses, strict=True)),
        gradients=len(names),
        gradients_equal=sum(error == 0.0 for error in errors.values()),
        worst_relative=errors.get(where, 0.0),
        worst_parameter=where,
    )


def on_all_ranks(found: Agreement) -> Agreement:
    """The agreements of all ranks as one, the same on each: a rank that differs must not decide differently."""
    if not dist.is_initialized():
        return found
    every: list[Agreement] = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    worst = max(every, key=lambda one: float("inf") if one.worst_relative is None else one.worst_relative)
    return replace(
        worst,
        losses_equal=all(one.losses_equal for one in every),
        gradients=sum(one.gradients for one in every),
        gradients_equal=sum(one.gradients_equal for one in every),
    )


def _relative(expected: torch.Tensor | None, found: torch.Tensor | None) -> float | None:
    """``‖found − expected‖ / ‖expected‖``; ``None`` where one of them is missing."""
    if expected is None or found is None or expected.shape != found.shape:
        return None
    if torch.equal(expected, found):
        return 0.0
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp_min(1e-300))


def _plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
