"""``exact``: the best order of a small graph, and a proof that it is, by constraint programming."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from overlap_pass.errors import EnvironmentRefused, OptionError, PlanError
from overlap_pass.graph.program import Role
from overlap_pass.schedule.exact_model import Model
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.fitting import fit
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["Exact"]


@dataclass(frozen=True, slots=True)
class Exact:
    """Every place of every launch and wait at once, as a model for CP-SAT of OR-tools (extra ``exact``).

    The model (``schedule.exact_model``) leaves out contention, the CPU's time and the rule that a collective starts
    between two kernels; without them its optimum is the simulator's. The order found is simulated as any other.

    Options:
        effort: limit of the solver's deterministic time, so that ranks agree; the best order by then is taken.
        largest: collectives that a graph may have.
    """

    name: ClassVar[str] = "exact"
    effort: float = 20.0
    largest: int = 48

    def __post_init__(self) -> None:
        if self.effort <= 0:
            raise OptionError(f"strategy exact: effort={self.effort} must be more than 0")
        if self.largest < 1:
            raise OptionError(f"strategy exact: largest={self.largest} must be 1 or more")

    def schedule(self, problem: Problem) -> Schedule:
        """Raises ``EnvironmentRefused`` without OR-tools, ``PlanError`` for a graph with too many collectives."""
        placement = Placement.of(problem)
        moving = sum(move.role is not Role.ACTIVATION for move in placement.moves)
        if moving > self.largest:
            raise PlanError(
                f"strategy exact: graph {problem.program.name!r} has {moving} collectives that may move, more than "
                f"largest={self.largest}; take 'local_search', or raise 'largest' and wait"
            )
        solver = _cp_sat()
        room = Room.shared(problem)
        score = Score(problem)
        proofs: list[bool] = []

        def solved(allowed_bytes: int | None) -> tuple[int, ...]:
            model = Model(solver, problem, placement, room, allowed_bytes)
            wishes = model.solve(self.effort)
            proofs.append(model.proved)
            return room.order if wishes is None else place(placement, wishes)

        order = fit(solved, score)
        if not score.fits(score.peak_bytes(order)):
            order = room.order
        names = tuple(problem.program.ops[p].name for p in order)
        why = "best order of the model" if proofs[-1] else "best order found within the effort"
        return Schedule(spec(self), names, explain(placement, order, why))


def _cp_sat() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise EnvironmentRefused(
            "strategy exact needs OR-tools, which is not installed: pip install 'overlap-pass[exact]'"
        ) from error
    return cp_model
