"""Times of kernels, collectives and launches, agreed on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from overlap_pass.profiling.timing import Clock

__all__ = ["Stopwatch"]

Run = Callable[[], object]

_PAUSE_CYCLES_PER_CALL = 200_000  # about 0.1 ms of a GPU's clock, longer than any launch takes


class Stopwatch:
    """Times of one rank's device, the slowest rank's wherever collectives are in it."""

    def __init__(self, device: torch.device, batches: int) -> None:
        self.device, self.batches = device, batches

    def queued_us(self, run: Run, count: int, *, behind: Run | None = None) -> float:
        """Time of one call in a queue of ``count`` on the device, which the CPU has issued before the first begins.

        Args:
            behind: what the device does before, without a break.
        """
        run()
        taken_us = []
        for _ in range(self.batches):
            self.settle()
            self.pause(count)
            if behind is not None:
                behind()
            clock = Clock(self.device)
            clock.mark()
            for _ in range(count):
                run()
            clock.mark()
            taken_us.append(clock.durations_us()[0] / count)
        return self.agreed_us(median(taken_us))

    def issued_us(self, run: Run, count: int) -> float:
        """Time that the CPU takes to issue one call, while the device has nothing to say: the least of the loops."""
        run()
        taken_us = []
        for _ in range(self.batches):
            self.settle()
            self.pause(count)
            start_s = time.perf_counter()
            for _ in range(count):
                run()
            taken_us.append((time.perf_counter() - start_s) * 1e6 / count)
        self.settle()
        return self.agreed_us(min(taken_us))

    def recorded_us(self, run: Run, count: int) -> float:
        """Time of one call among ``count`` in a CUDA graph: what the device takes where the CPU has no part in it."""
        run()
        self.settle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog is another thread
            for _ in range(count):
                run()
        return self.queued_us(graph.replay, 1) / count

    def beside_us(
        self, run: Run, count: int, other: Run, others: int, *, behind: Run | None = None
    ) -> tuple[float, float]:
        """Times of one ``run`` and of one ``other`` while a queue of each runs on a stream of its own.

        The one with the shorter queue is beside the other all the time; only its time means anything.

        Args:
            behind: what the device does before, without a break.
        """
        own, side = torch.cuda.current_stream(), torch.cuda.Stream()
        self.settle()
        self.pause(count + others)
        if behind is not None:
            behind()
        side.wait_stream(own)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.cuda.stream(side):
            marks[0].record()
            for _ in range(others):
                other()
            marks[1].record()
        marks[2].record()
        for _ in range(count):
            run()
        marks[3].record()
        self.settle()
        return (
            self.agreed_us(marks[2].elapsed_time(marks[3]) * 1e3 / count),
            self.agreed_us(marks[0].elapsed_time(marks[1]) * 1e3 / others),
        )

    def settle(self) -> None:
        """Nothing runs any more, on any rank."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def pause(self, calls: int) -> None:
        """Keep the device from starting until the CPU has issued so many calls."""
        if self.device.type == "cuda":
            torch.cuda._sleep(_PAUSE_CYCLES_PER_CALL * calls)

    def agreed_us(self, time_us: float) -> float:
        """The slowest rank's."""
        value = torch.tensor([time_us], dtype=torch.float64, device=self.device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return float(value.item())
