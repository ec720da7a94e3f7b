"""The step where nothing slows anything: every start is a maximum of a few ends, so one walk along the order gives it.

That is so without contention, where a collective needs no place between kernels, holds up nothing before it begins, and no
copy engine carries it. The result is that of :class:`~overlap_pass.simulate.device.Device` to the last bit, in a tenth of the
time: the recorded graphs that planners are compared on have such prices.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.model import CostTable
from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.program import OpKind, Program

__all__ = ["Recurrence"]


class Recurrence:
    """One program and prices for which :meth:`holds`; orders name ops by position."""

    def __init__(self, program: Program, costs: CostTable) -> None:
        ops = program.ops
        self._ops, self._cpu_ahead_us = ops, costs.cpu_ahead_us
        self._issue_us = [costs.launch_us.get(op.name, 0.0) for op in ops]
        timed = (OpKind.COMPUTE, OpKind.LAUNCH)
        self._length_us = [costs.duration_us.get(op.name, 0.0) if op.kind in timed else 0.0 for op in ops]
        lanes = [None if op.collective is None else costs.lane_of(op.name, op.collective) for op in ops]
        number = {lane: place for place, lane in enumerate(dict.fromkeys(lane for lane in lanes if lane is not None))}
        self._lane_count = len(number)
        self._lane = [None if lane is None else number[lane] for lane in lanes]
        self._awaited = [None if op.launch is None else program.index[op.launch] for op in ops]
        columns = zip(self._issue_us, self._length_us, self._lane, self._awaited, strict=True)
        self._counts = [bool(us or runs_us) or (lane, launch) != (None, None) for us, runs_us, lane, launch in columns]
        self._heard: tuple[Sequence[int] | None, list[int]] = (None, [])

    @staticmethod
    def holds(program: Program, costs: CostTable) -> bool:
        """Whether nothing slows anything at these prices."""
        slow = costs.contention != Contention() or costs.beside_compute or costs.starts_between_kernels
        by_copy = any(op.collective is not None and op.collective.by_copy for op in program.launches)
        return not (slow or by_copy or costs.most_pending is not None or any(costs.kernel_us.values()))

    def walk(self, order: Sequence[int] | None = None, *, stretch: float = 1.0) -> tuple[float, dict[int, float]]:
        """The step of an order of all positions, ``None`` for as written; and for the launches whose waits held the compute lane,
        how long.

        Args:
            stretch: every collective takes that many times its price.

        Raises:
            IllegalSchedule: a wait comes before its launch.
        """
        issue_us, length_us, lane_of, awaited_of = self._issue_us, self._length_us, self._lane, self._awaited
        free_us, ends_us, blocked_us = [0.0] * self._lane_count, dict[int, float](), dict[int, float]()
        now_us, clock_us = 0.0, -self._cpu_ahead_us
        for position in self._heard_of(order):
            clock_us += issue_us[position]
            lane, awaited = lane_of[position], awaited_of[position]
            start_us = clock_us if clock_us > now_us else now_us
            if lane is not None:
                if free_us[lane] > start_us:
                    start_us = free_us[lane]
                ends_us[position] = free_us[lane] = start_us + length_us[position] * stretch
            elif awaited is not None:
                if awaited not in ends_us:
                    self._refuse(position)
                now_us = ends_us[awaited]
                if now_us > start_us:
                    blocked_us[awaited] = blocked_us.get(awaited, 0.0) + now_us - start_us
                else:
                    now_us = start_us
            elif length_us[position]:
                now_us = start_us + length_us[position]
        return max(now_us, clock_us, *free_us), blocked_us

    def _heard_of(self, order: Sequence[int] | None) -> list[int]:
        """Of an order, what takes time or communicates; kept for other prices of the same order."""
        if order is None or self._heard[0] is not order:
            counts = self._counts
            heard = [position for position in (range(len(counts)) if order is None else order) if counts[position]]
            self._heard = (order if isinstance(order, tuple) else None, heard)
        return self._heard[1]

    def _refuse(self, position: int) -> None:
        op = self._ops[position]
        raise IllegalSchedule(f"wait {op.name!r} comes before its launch {op.launch!r}: launch it first")
