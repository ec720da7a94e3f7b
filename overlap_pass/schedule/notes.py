"""What the reader of a plan should know about its figures."""

from __future__ import annotations

from overlap_pass.cost.model import CostTable
from overlap_pass.simulate.bound import CPU_LANE, Bound
from overlap_pass.simulate.engine import Simulation
from overlap_pass.units import format_us

__all__ = ["by_launches", "slower", "unpriced"]

_CPU_BOUND = 0.9
"""Of the step, that the CPU launches for: from there on a note says so."""


def slower(written: Simulation, after: Simulation, why: str) -> tuple[str, ...]:
    """That the order as written is faster here, and why it is not taken."""
    if after.step_us <= written.step_us:
        return ()
    return (f"predicted at {format_us(after.step_us)}, the order as written at {format_us(written.step_us)}: {why}",)


def by_launches(bound: Bound, after: Simulation) -> tuple[str, ...]:
    """Where the CPU is busy for nearly all of the step, no order helps; the note says what does."""
    launching_us = bound.values[CPU_LANE]
    if launching_us < _CPU_BOUND * after.step_us or not launching_us:
        return ()
    return (
        f"bound by the CPU, which launches for {format_us(launching_us)} of {format_us(after.step_us)}: take "
        "mode='reduce-overhead' (CUDA graphs), more tokens a step, or transport='nccl', which launches less",
    )


def unpriced(costs: CostTable) -> tuple[str, ...]:
    """Ops that no formula covers."""
    if not costs.unknown:
        return ()
    shown = ", ".join(costs.unknown[:5])
    return (f"{len(costs.unknown)} ops priced by memory traffic alone (no formula): {shown}",)
