"""All-gathers by copy engine: each rank fetches its peers' shards out of symmetric memory, on no multiprocessor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from overlap_pass.cost.hardware import CopyEngine
from overlap_pass.errors import EnvironmentRefused
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.collective_rates import Group, beside_gemm
from overlap_pass.profiling.stopwatch import Stopwatch

__all__ = ["copy_engine"]


def copy_engine(group: Group, scale: Scale, watch: Stopwatch) -> CopyEngine:
    """Measure gathers by copy between the GPUs of one group.

    Raises:
        EnvironmentRefused: why there is no symmetric memory here.
    """
    large = _Gather.over(group, scale.gather_bytes, watch.device)
    small = _Gather.over(group, 64 * 2**10, watch.device)
    large_us, small_us = watch.queued_us(large.fetch, 4), watch.queued_us(small, 30)
    factors = beside_gemm(large.fetch, scale, watch)
    crossing_bytes = scale.gather_bytes * (group.ranks - 1) / group.ranks
    return CopyEngine(
        bandwidth_gb_per_s=crossing_bytes / large_us / 1e3,
        latency_us=small_us,
        launch_us=watch.issued_us(small, scale.launches // 2),
        compute_beside_communication=factors.compute_beside_communication,
        communication_beside_compute=factors.communication_beside_compute,
    )


@dataclass(frozen=True)
class _Gather:
    """One gather: the peers' shards are copied into ``full``; a call waits for all ranks before."""

    handle: Any
    full: torch.Tensor
    rows: int

    @classmethod
    def over(cls, group: Group, payload_bytes: int, device: torch.device) -> _Gather:
        if device.type != "cuda":
            raise EnvironmentRefused("symmetric memory needs CUDA devices")
        rows = math.ceil(payload_bytes / 2 / group.ranks)
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            shard = symmetric_memory.empty(rows, dtype=torch.bfloat16, device=device)
            handle = symmetric_memory.rendezvous(shard, group.process_group.group_name)
        except (ImportError, AttributeError, RuntimeError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise EnvironmentRefused(f"symmetric memory is not available: {type(error).__name__}: {reason}") from error
        full = torch.zeros(group.ranks, rows, dtype=torch.bfloat16, device=device)
        return cls(handle, full, rows)

    def fetch(self) -> None:
        for peer in range(self.full.shape[0]):
            if peer != self.handle.rank:
                self.full[peer].copy_(self.handle.get_buffer(peer, (self.rows,), torch.bfloat16))

    def __call__(self) -> None:
        self.handle.barrier(channel=0)
        self.fetch()
