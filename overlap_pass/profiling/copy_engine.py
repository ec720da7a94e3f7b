"""All-gathers by copy engine, measured with the carrier that compiled models use (``transport="copy_engine"``)."""

from __future__ import annotations

import math
from itertools import cycle

import torch

from overlap_pass.cost.hardware import CopyEngine
from overlap_pass.errors import EnvironmentRefused, TransportError
from overlap_pass.memory.places import WORDS, tenancies
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.collective_rates import Group, beside_gemm
from overlap_pass.profiling.stopwatch import Run, Stopwatch
from overlap_pass.transport.choice import why_not_by_copy

__all__ = ["copy_engine"]

_SMALL_BYTES = 64 * 2**10


def copy_engine(group: Group, scale: Scale, watch: Stopwatch) -> CopyEngine:
    """Measure gathers by copy between the GPUs of one group.

    Raises:
        EnvironmentRefused: why these GPUs cannot copy from each other, or have no symmetric memory to do so.
    """
    if watch.device.type != "cuda":
        raise EnvironmentRefused("copies between GPUs need CUDA devices")
    if (reason := why_not_by_copy(group.process_group.group_name)) is not None:
        raise EnvironmentRefused(reason)
    try:
        return _measured(group, scale, watch)
    except (ImportError, AttributeError, RuntimeError, TransportError) as error:
        reason = str(error).partition("\n")[0]
        raise EnvironmentRefused(f"symmetric memory is not available: {type(error).__name__}: {reason}") from error


def _measured(group: Group, scale: Scale, watch: Stopwatch) -> CopyEngine:
    shard, large = _gather(scale.gather_bytes, group, watch.device)
    _, small = _gather(_SMALL_BYTES, group, watch.device)
    large_us, small_us = watch.queued_us(large, 4), watch.queued_us(small, 30)
    # The shard is first written to two places by a kernel, which plans price on its own.
    copies_us = large_us - small_us - watch.queued_us(_cast(shard), 4)
    factors = beside_gemm(large, scale, watch)
    crossing_bytes = scale.gather_bytes * (group.ranks - 1) / group.ranks
    return CopyEngine(
        bandwidth_gb_per_s=crossing_bytes / max(copies_us, 1.0) / 1e3,
        latency_us=small_us,
        launch_us=watch.issued_us(small, scale.launches // 2),
        compute_beside_communication=factors.compute_beside_communication,
        communication_beside_compute=factors.communication_beside_compute,
    )


def _gather(payload_bytes: int, group: Group, device: torch.device) -> tuple[torch.Tensor, Run]:
    """A rank's shard of a bf16 tensor of so many bytes, and a call that gathers it and waits."""
    from overlap_pass.transport.copy_engine import start_gather

    shard = torch.zeros(math.ceil(payload_bytes / 2 / group.ranks), dtype=torch.bfloat16, device=device)
    name = group.process_group.group_name
    places = cycle(tenancy.place for tenancy in tenancies([shard.nbytes] * WORDS))

    def gather() -> object:
        (full,) = start_gather([shard], torch.bfloat16, name, next(places))
        return torch.ops._c10d_functional.wait_tensor(full)

    return shard, gather


def _cast(shard: torch.Tensor) -> Run:
    from overlap_pass.transport.kernels import cast_to_both

    first, second = torch.empty_like(shard), torch.empty_like(shard)
    return lambda: cast_to_both(shard, (first, 0), (second, 0))
