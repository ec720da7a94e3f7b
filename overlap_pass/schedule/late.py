"""Which waits of a backward may be put off beyond it: those behind its last compute, for reductions that nothing hides.

::

    in the graph      backward ████████▒▒▒▒   optimizer ████████
    across the edge   backward ████████       optimizer ██▒▒████         ▒ the last reductions, whose parameters come later
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from overlap_pass.graph.program import CollectiveKind, OpKind, Program, Role
from overlap_pass.simulate.engine import Simulation
from overlap_pass.timeline.spans import SpanKind
from overlap_pass.units import format_us, ns_to_us

__all__ = ["Late", "put_off"]


@dataclass(frozen=True, slots=True)
class Late:
    """The waits that a backward leaves to the step behind it.

    Attributes:
        waits: their names, in the order of the plan.
        parameters: whose gradients they wait for.
        saved_us: how long the simulated graph runs behind its last compute: what an optimizer on other parameters hides.
    """

    waits: tuple[str, ...]
    parameters: tuple[str, ...]
    saved_us: float

    def summary(self) -> str:
        """For a log or a report."""
        return (
            f"reduced across the step's edge: {', '.join(self.parameters)}: saves {format_us(self.saved_us)} a step where "
            "StepEdge.step(loss) runs the backward and what is updated before them takes as long (predicted)"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def put_off(program: Program, order: Sequence[str], planned: Simulation) -> Late | None:
    """The waits that stand, with views alone, between the last compute of a backward and its return; ``None`` for none."""
    waits: list[str] = []
    for name in reversed(order):
        op = program.op(name)
        if op.kind is OpKind.WAIT and not op.kernel and _reduces_gradient(program, op.launch):
            waits.append(name)
        elif op.kind not in (OpKind.VIEW, OpKind.OUTPUT, OpKind.INPUT):
            break
    if not waits:
        return None
    waits.reverse()
    launches = dict.fromkeys(program.op(name).launch for name in waits)
    served = (program.op(launch).collective for launch in launches if launch is not None)
    return Late(
        tuple(waits), tuple(c.parameter or c.unit or c.group for c in served if c is not None), _behind_us(planned)
    )


def _reduces_gradient(program: Program, launch: str | None) -> bool:
    collective = None if launch is None else program.op(launch).collective
    return (
        collective is not None and collective.kind is CollectiveKind.REDUCE_SCATTER and collective.role is Role.GRADIENT
    )


def _behind_us(planned: Simulation) -> float:
    timeline = planned.timeline
    last_ns = max((span.end_ns for span in timeline.spans if span.kind is SpanKind.COMPUTE), default=0)
    return ns_to_us(timeline.window_ns - last_ns)
