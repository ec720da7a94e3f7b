"""Step times on the device, of several variants side by side, without a profiler in the way."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from overlap_pass.profiling.workload import Workload

__all__ = ["Clock", "interleaved"]


class Clock:
    """Marks on the timeline of a device: CUDA events on a GPU, the host's clock (after the work is done) on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def durations_us(self) -> list[float]:
        """Microseconds between consecutive marks; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [
            first.elapsed_time(second) * 1e3  # type: ignore[union-attr, arg-type]
            if self._cuda
            else (second - first) * 1e6  # type: ignore[operator]
            for first, second in pairs
        ]


def interleaved(
    workloads: Sequence[Workload], device: torch.device, *, rounds: int, steps: int
) -> list[tuple[tuple[float, ...], ...]]:
    """Step times of each workload, in microseconds, the slowest rank's at every step.

    Blocks of ``steps`` steps alternate in the order A B C … then … C B A (a slow drift of the machine then weighs on
    all alike); the counts are fixed, so that every rank runs the same collectives.

    Returns:
        For each workload ``rounds`` blocks of ``steps`` samples, in the order they were taken.
    """
    blocks: list[list[tuple[float, ...]]] = [[] for _ in workloads]
    forth = list(range(len(workloads)))
    for turn in range(rounds):
        for which in forth if turn % 2 == 0 else reversed(forth):
            workloads[which]()  # refills caches after the change
            clock = Clock(device)
            clock.mark()
            for _ in range(steps):
                workloads[which]()
                clock.mark()
            blocks[which].append(_slowest_rank(clock.durations_us(), device))
    return [tuple(found) for found in blocks]


def _slowest_rank(durations_us: list[float], device: torch.device) -> tuple[float, ...]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return tuple(durations_us)
    values = torch.tensor(durations_us, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return tuple(values.tolist())
