"""``options={"verify": "first_steps"}``: both orders in the first steps of a training run, then the faster one for good.

A graph is lowered twice, as written and as scheduled. Its first calls alternate between the two in a fixed pattern::

    3 × written, 3 × scheduled        compile, warm up
    W W W  S S S  S S S  W W W        twice; the first call of each block fills caches and is not counted

The time of a call is that from its begin to the begin of the next call, on the device: forward, backward (which is another
graph, of the same lowering), optimizer, everything that makes a step. At the call behind the pattern the ranks take the
slowest rank's time of each call, over the groups that the graph's parameters lie on, and so all come to one decision.

Nothing can hang that would not hang without it: what is called how often follows from the number of calls alone, which is
equal on all ranks that share a collective; the agreement itself is one collective of each group, at the same place between
two steps on each of its ranks, and outside of compilation.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.tensor import DTensor

from overlap_pass.config import Config
from overlap_pass.profiling.timing import Clock
from overlap_pass.units import format_us

__all__ = ["PATTERN", "FirstSteps", "groups_of", "lowered"]

_log = logging.getLogger("overlap_pass")

Lower = Callable[[fx.GraphModule, Sequence[Any], Config], Callable[..., Any]]

_WRITTEN, _SCHEDULED = 0, 1
_WARM_UP, _BLOCK = 3, 3
_BLOCKS = (_WRITTEN, _SCHEDULED, _SCHEDULED, _WRITTEN) * 2

PATTERN: tuple[tuple[int, bool], ...] = (
    *((which, False) for which in (_WRITTEN, _SCHEDULED) for _ in range(_WARM_UP)),
    *((which, turn > 0) for which in _BLOCKS for turn in range(_BLOCK)),
)
"""For each of the first calls which lowering runs (0: as written, 1: as scheduled), and whether its time counts."""


def lowered(gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config, lower: Lower) -> Callable[..., Any]:
    """The graph lowered as ``config.verify`` says: as scheduled, or both ways until the faster one is known."""
    groups = groups_of(example_inputs) if config.verify == "first_steps" else ()
    if not groups:
        return lower(gm, example_inputs, config)
    # Inductor changes the graph that it is given. Tensors that hang on it are shared and not copied.
    shared = {id(tensor): tensor for tensor in (*gm.parameters(), *gm.buffers())}
    written = lower(copy.deepcopy(gm, shared), list(example_inputs), config.as_written())
    return FirstSteps(written, lower(gm, example_inputs, config), groups)


def groups_of(example_inputs: Sequence[Any]) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of all dimensions of the meshes that a graph's inputs lie on, in the same order on each rank.

    Reducing over one after the other reduces over the whole mesh, tensor-parallel dimensions included. Ranks that run
    other graphs (pipeline stages) are on other meshes.
    """
    meshes = dict.fromkeys(value.device_mesh for value in example_inputs if isinstance(value, DTensor))
    found = [mesh.get_group(dimension) for mesh in meshes for dimension in range(mesh.ndim)]
    return tuple(dict.fromkeys(group for group in found if group.size() > 1))


class FirstSteps:
    """Stands where the lowered graph stood; behind the last call of :data:`PATTERN` it is the faster of the two."""

    def __init__(
        self, written: Callable[..., Any], scheduled: Callable[..., Any], groups: Sequence[dist.ProcessGroup]
    ) -> None:
        self._both: tuple[Callable[..., Any], ...] = (written, scheduled)
        self._groups = tuple(groups)
        self._clock: Clock | None = None
        self._calls = 0
        self._run: Callable[..., Any] = self._compare

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _compare(self, *args: Any) -> Any:
        if self._clock is None:
            self._clock = Clock(_device(args))
        self._clock.mark()
        if self._calls == len(PATTERN):
            self._decide(self._clock)
            return self._run(*args)
        which, _ = PATTERN[self._calls]
        self._calls += 1
        return self._both[which](*args)

    def _decide(self, clock: Clock) -> None:
        times_us = _slowest(clock.durations_us(), self._groups, clock.device)
        median_us = [
            median(time_us for time_us, (ran, counts) in zip(times_us, PATTERN, strict=True) if counts and ran == which)
            for which in (_WRITTEN, _SCHEDULED)
        ]
        winner = _SCHEDULED if median_us[_SCHEDULED] < median_us[_WRITTEN] else _WRITTEN
        _log.info(
            "verify=first_steps: %s a step as scheduled, %s as written: from here on as %s",
            format_us(median_us[_SCHEDULED]),
            format_us(median_us[_WRITTEN]),
            "scheduled" if winner == _SCHEDULED else "written",
        )
        self._run = self._both[winner]
        self._both, self._groups, self._clock = (), (), None  # the loser's code and constants are given back


def _device(args: Sequence[Any]) -> torch.device:
    for value in args:
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return torch.device("cpu")


def _slowest(times_us: Sequence[float], groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[float]:
    """For each call the time of the rank that took longest."""
    values = torch.tensor(times_us, dtype=torch.float64, device=device)
    for group in groups:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return list(values.tolist())
