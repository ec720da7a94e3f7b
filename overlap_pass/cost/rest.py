"""How fast a device computes that has to rest: the clock that its power limit leaves it.

The limit bounds the mean of what is drawn over some ten milliseconds, and a chip draws with about the cube of its clock, since
voltage follows. A device that computes all the time so runs at the rate that hardware files give; one that computes for the
share d of the time may run ``d ** (-1/3)`` times as fast, up to its highest clock. Seen on H200: GEMMs of steps through host
memory, where communication takes twice as long as compute, reach 0.80 of the peak alone, as after a pause, where those of a
step that computes without one reach 0.70.

How long a device computes at most is told by the busiest lane beside it: no order makes the step shorter than that, so the
clock depends on the graph and not on its order. Copies and casts go at the memory's speed, which has a clock of its own.
"""

from __future__ import annotations

from dataclasses import replace

from overlap_pass.cost.hardware import Hardware
from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import OpKind, Program

__all__ = ["as_rested"]


def as_rested(hardware: Hardware, program: Program, costs: CostTable) -> Hardware:
    """The machine as fast as this graph lets it run.

    Args:
        costs: prices on a machine that does not rest.
    """
    highest = hardware.compute.rested_speedup
    if highest is None:
        return hardware
    compute_us = sum(costs.kernel_us.values(), 0.0)
    lanes_us: dict[str, float] = {}
    for op in program.ops:
        if op.kind is OpKind.COMPUTE:
            compute_us += costs.duration_us[op.name]
        elif op.collective is not None:
            lane = costs.lane_of(op.name, op.collective)
            lanes_us[lane] = lanes_us.get(lane, 0.0) + costs.duration_us[op.name]
    busiest_us = max(lanes_us.values(), default=0.0)
    if busiest_us <= compute_us:
        return hardware
    speedup = min(highest, (busiest_us / compute_us) ** (1 / 3)) if compute_us else highest
    compute = replace(
        hardware.compute,
        matmul_efficiency=min(1.0, speedup * hardware.compute.matmul_efficiency),
        attention_efficiency=min(1.0, speedup * hardware.compute.attention_efficiency),
    )
    return replace(hardware, compute=compute)
