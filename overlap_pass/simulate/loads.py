"""What each lane of collectives carries, and how much can be gained by running it beside compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import OpKind, OpNode, Program

__all__ = ["Job", "LaneLoad", "busiest_lane_us", "lane_loads"]


@dataclass(frozen=True, slots=True)
class Job:
    """One collective on a lane, in the letters of ``simulate.bound``.

    Attributes:
        launch: its position.
        time_us: what it takes alone, K.
        gain: ``g = 1/c + 1/k - 1``, gained in each unit of time beside compute; 0 where nothing is.
        gain_us: ``g k K``, the most that it can gain.
    """

    launch: int
    time_us: float
    gain: float
    gain_us: float


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """Collectives that share a communicator, a copy engine or a wire.

    On a wire n of them may run at once and move ``n / (1 + (n - 1)(f - 1))`` times what one does. With the most that
    this can be as ``speedup``, all times are divided by it.

    Attributes:
        name: what a bound by this lane is called.
        jobs: the collectives, in the order as written.
        total_us: their times.
        gain_per_us: ``max g c``, the most that a microsecond of compute can gain beside them.
        speedup: see above; 1 for what runs one at a time.
    """

    name: str
    jobs: tuple[Job, ...]
    total_us: float
    gain_per_us: float
    speedup: float

    def span_us(self, compute_us: float, communication_us: float, gain_us: float) -> float:
        """Least time for so much compute and communication, if at most ``gain_us`` is gained side by side."""
        return compute_us + communication_us - min(gain_us, self.gain_per_us * compute_us)


def lane_loads(program: Program, costs: CostTable) -> tuple[LaneLoad, ...]:
    """One for each lane that runs collectives, and one for each wire that several of them share."""
    by_lane: dict[str, list[OpNode]] = {}
    by_wire: dict[str, list[OpNode]] = {}
    for op in program.launches:
        if op.collective is not None:
            lane = costs.lane_of(op.name, op.collective)
            by_lane.setdefault(f"communicator {lane}" if lane == op.collective.group else lane, []).append(op)
            by_wire.setdefault(f"wire {costs.wires.get(op.collective.group, '')}".strip(), []).append(op)
    lanes = [_load(name, launches, program, costs) for name, launches in by_lane.items()]
    wires = [_load(name, launches, program, costs) for name, launches in by_wire.items()]
    return (*lanes, *(wire for wire in wires if wire.jobs not in [lane.jobs for lane in lanes]))


def busiest_lane_us(program: Program, costs: CostTable) -> float:
    """What the busiest lane has to do, without contention: no order takes less, and this takes no time to say."""
    compute_us = sum(costs.kernel_us.values())
    compute_us += sum(costs.duration_us.get(op.name, 0.0) for op in program.ops if op.kind is OpKind.COMPUTE)
    lanes_us: dict[str, float] = {}
    for op in program.launches:
        if op.collective is not None:
            lane = costs.lane_of(op.name, op.collective)
            lanes_us[lane] = lanes_us.get(lane, 0.0) + costs.duration_us.get(op.name, 0.0)
    return max(compute_us, *lanes_us.values(), 0.0)


def _load(name: str, launches: Sequence[OpNode], program: Program, costs: CostTable) -> LaneLoad:
    at_once = len({costs.lane_of(op.name, op.collective) for op in launches if op.collective is not None})
    sharing = 1.0 + (at_once - 1) * (costs.contention.communication_beside_communication - 1.0)
    speedup = max(1.0, at_once / sharing)
    jobs, gains_per_us = [], [0.0]
    for op in launches:
        contention = costs.contention_of(op.name)
        slow, slowed = contention.compute_beside_communication, contention.communication_beside_compute
        gain = max(0.0, 1.0 / slow + 1.0 / slowed - 1.0)
        time_us = costs.duration_us.get(op.name, 0.0) / speedup
        jobs.append(Job(program.index[op.name], time_us, gain, gain * slowed * time_us))
        gains_per_us.append(gain * slow)
    return LaneLoad(name, tuple(jobs), sum(job.time_us for job in jobs), max(gains_per_us), speedup)
