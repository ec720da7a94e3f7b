"""A profiler trace of a few steps, and the typical one among them as a timeline."""

from __future__ import annotations

from pathlib import Path
from statistics import median_low

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from overlap_pass.profiling.workload import Workload
from overlap_pass.timeline.spans import Timeline
from overlap_pass.traces.capture import read_trace, timelines

__all__ = ["profile_steps", "typical_step"]


def profile_steps(workload: Workload, path: Path, *, steps: int) -> None:
    """Write a Kineto trace of ``steps`` steps after two that only warm the profiler up.

    The number of steps is fixed, so that every rank runs the same collectives. Stacks and shapes are left out: they
    slow the CPU down and make a step look launch-bound that is not.
    """
    plan = schedule(wait=0, warmup=2, active=steps, repeat=1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan) as profiler:
        for index in range(steps + 2):
            workload()
            if index == steps + 1:
                torch.cuda.synchronize()  # device events of the last step must be there before the trace ends
            profiler.step()
    profiler.export_chrome_trace(str(path))


def typical_step(path: Path, label: str) -> Timeline:
    """The step of (lower) median length in a trace.

    Raises:
        TraceError: the trace holds no device events.
    """
    found = timelines(read_trace(path))
    length_ns = median_low([timeline.window_ns for timeline in found])
    chosen = next(timeline for timeline in found if timeline.window_ns == length_ns)
    return Timeline(label, chosen.window_ns, chosen.spans, chosen.predicted)
