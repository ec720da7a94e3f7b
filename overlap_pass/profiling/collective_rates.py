"""What collectives take: alone by size and group, beside a GEMM, to launch, and by copy engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.fit import CollectiveSample
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.kernel_rates import gemm, training_load
from overlap_pass.profiling.stopwatch import Run, Stopwatch

__all__ = ["Group", "beside_gemm", "collective", "collective_launch_us", "collective_samples", "contention"]

KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_TO_ALL,
)


@dataclass(frozen=True)
class Group:
    """A process group to measure, and where its ranks are.

    Attributes:
        name: what reports call it.
        ranks_per_node: its members on each node.
    """

    name: str
    process_group: dist.ProcessGroup
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.process_group.size()


def collective(kind: CollectiveKind, payload_bytes: int, group: Group, device: torch.device) -> Run:
    """A call of one collective whose full tensor has ``payload_bytes`` (rounded up to what the ranks share evenly)."""
    dtype = torch.float32 if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE) else torch.bfloat16
    per_rank = math.ceil(payload_bytes / dtype.itemsize / group.ranks)
    full = torch.zeros(per_rank * group.ranks, dtype=dtype, device=device)
    shard = torch.zeros(per_rank, dtype=dtype, device=device)
    process_group = group.process_group
    calls: dict[CollectiveKind, Callable[[], object]] = {
        CollectiveKind.ALL_GATHER: lambda: dist.all_gather_into_tensor(full, shard, group=process_group),
        CollectiveKind.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(shard, full, group=process_group),
        CollectiveKind.ALL_REDUCE: lambda: dist.all_reduce(full, group=process_group),
    }
    if kind is CollectiveKind.ALL_TO_ALL:
        received = torch.zeros_like(full)
        return lambda: dist.all_to_all_single(received, full, group=process_group)
    return calls[kind]


def collective_samples(group: Group, scale: Scale, watch: Stopwatch) -> Iterator[CollectiveSample]:
    for kind in KINDS:
        for payload_bytes in scale.collective_bytes:
            run = collective(kind, payload_bytes, group, watch.device)
            time_us = watch.queued_us(run, scale.repeats(payload_bytes))
            yield CollectiveSample(kind, payload_bytes, group.ranks, group.ranks_per_node, time_us)


def collective_launch_us(group: Group, scale: Scale, watch: Stopwatch) -> float:
    """Time of the CPU to launch one collective and its wait the way compiled code does."""
    ops = torch.ops._c10d_functional
    shard = torch.zeros(4096, dtype=torch.bfloat16, device=watch.device)
    name = group.process_group.group_name
    return watch.issued_us(
        lambda: ops.wait_tensor(ops.all_gather_into_tensor(shard, group.ranks, name)), scale.launches // 2
    )


def contention(kind: CollectiveKind, group: Group, scale: Scale, watch: Stopwatch) -> Contention:
    """How a GEMM and one kind of collective slow each other down."""
    payload_bytes = scale.gather_bytes if kind is CollectiveKind.ALL_GATHER else scale.reduce_bytes
    return beside_gemm(collective(kind, payload_bytes, group, watch.device), scale, watch)


def beside_gemm(run: Run, scale: Scale, watch: Stopwatch) -> Contention:
    """How a GEMM and a collective slow each other down, each beside a queue of the other that outlasts it.

    The GEMMs are timed as a training step runs them, behind others and for long enough: where power is the limit, what a
    collective takes of the multiprocessors it gives back in part as clock.

    The lengths of the queues follow from times that all ranks have agreed on, so they are the same on every rank.
    """
    load = training_load(scale, watch.device)
    left, right = gemm(scale.gemms[-3], watch.device)
    out = left @ right

    def multiply() -> object:
        return torch.mm(left, right, out=out)

    gemm_us, collective_us = watch.queued_us(multiply, scale.busy_gemms, behind=load), watch.queued_us(run, 4)
    collectives = max(2, math.ceil(3 * scale.busy_gemms * gemm_us / collective_us))
    gemms = max(2, math.ceil(3 * 4 * collective_us / gemm_us))
    gemm_beside_us, _ = watch.beside_us(multiply, scale.busy_gemms, run, collectives, behind=load)
    _, collective_beside_us = watch.beside_us(multiply, gemms, run, 4)
    return Contention(
        compute_beside_communication=max(1.0, gemm_beside_us / gemm_us),
        communication_beside_compute=max(1.0, collective_beside_us / collective_us),
    )
