"""What this process runs on, and what about it speaks against overlap or against figures of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import combinations

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

__all__ = ["concerns", "described", "device_name", "is_first_rank", "profiler_sees_kernels"]

_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
              "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE",
              "NCCL_NVLS_ENABLE", "NCCL_MAX_CTAS", "NCCL_ALGO", "NCCL_PROTO")  # fmt: skip

_SETTINGS = {
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1"): (
        "streams share one hardware queue, so a collective starts where it was launched and not when it could; unset it"
    ),
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel is waited for, so nothing overlaps; unset it",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "waits block the CPU, which then launches late; unset it",
    ("TORCH_NCCL_AVOID_RECORD_STREAMS", "0"): (
        "buffers of collectives are given back late, so the peak is above the planned one; unset it"
    ),
    ("NCCL_P2P_DISABLE", "1"): "collectives go through host memory; unset it unless that is what is to be measured",
}
"""(variable, value) → what it does to overlap."""


def device_name() -> str | None:
    """Name of this process's CUDA device, ``None`` without one. Costs go by it, never by a measurement of this rank."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def described(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Devices, versions and settings that figures depend on, as (name, value) pairs for a report."""
    found = [("hardware", f"{dist.get_world_size()} × {device_name() or 'CPU'}"), ("torch", torch.__version__)]
    if torch.cuda.is_available():
        found.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))  # type: ignore[no-untyped-call]
        found.append(("links", "no peer-to-peer" if _unreachable() else "peer-to-peer"))
    set_here = [f"{name}={environment[name]}" for name in _VARIABLES if name in environment]
    return (*found, ("environment", ", ".join(set_here) or "defaults"))


def concerns(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What speaks against overlap here, a sentence each."""
    found = [
        f"{name}={value}: {effect}" for (name, value), effect in _SETTINGS.items() if environment.get(name) == value
    ]
    if pairs := _unreachable():
        one, other = pairs[0]
        found.append(
            f"GPU {one} and GPU {other} have no peer-to-peer access: collectives between them go through host memory"
        )
    return tuple(found)


def _unreachable() -> list[tuple[int, int]]:
    """Pairs of this machine's GPUs that cannot read each other's memory."""
    pairs = combinations(range(torch.cuda.device_count()), 2)
    return [(one, other) for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]


def profiler_sees_kernels(device: torch.device) -> bool:
    """Whether the profiler may look at every rank's device, found out with one kernel; the same answer on all ranks."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize()
    seen = any(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())
    everywhere = torch.tensor([int(seen)], device=device)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    return bool(everywhere.item())
