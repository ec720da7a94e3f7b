"""What goes into a strategy and what comes out: ``Problem`` → ``Schedule``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.once import keep, once
from overlap_pass.graph.program import Program
from overlap_pass.memory.ledger import Lifetimes

__all__ = ["Action", "Decision", "Problem", "Schedule", "Strategy"]


_Made = TypeVar("_Made")


class Action(enum.StrEnum):
    HOIST = "hoist"
    """The op runs earlier than written."""
    SINK = "sink"
    """The op runs later than written."""
    KEEP = "keep"
    """The op stays, though the strategy looked at it."""
    REFUSE = "refuse"
    """A move was wanted and not allowed (budget, legality)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One move, or one move refused, and why.

    Attributes:
        op: the launch or wait.
        moved_over: ops of the order as written that it changed places with.
        reason: a sentence with numbers.
    """

    op: str
    action: Action
    moved_over: int
    reason: str


@dataclass(frozen=True)
class Problem:
    """Everything a strategy may look at.

    Attributes:
        dag: the dependency graph (``dag.program`` is the program, in the order as written).
        costs: the price of every op and the contention between lanes.
        budget_bytes: bound on the peak of the schedule, ``None`` for no bound.
    """

    dag: DepGraph
    costs: CostTable
    budget_bytes: int | None
    _made: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    _made_for_all: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def program(self) -> Program:
        return self.dag.program

    def once(self, make: Callable[[Problem], _Made]) -> _Made:
        """What ``make`` makes of the graph and its prices (the budget, it may not look at): made once for this problem and its
        copies with another budget."""
        return _once(self._made, make, self)

    def once_for_all(self, make: Callable[[Problem], _Made]) -> _Made:
        """The same of what no order of the program changes: shared with all that :meth:`reordered` makes of it, too."""
        return _once(self._made_for_all, make, self)

    def reordered(self, order: Sequence[int]) -> Problem:
        """The problem as if its program had been written in another legal order, by position."""
        program = replace(self.program, ops=tuple(self.program.ops[position] for position in order))
        keep(program, Lifetimes, once(self.program, Lifetimes).of_order(order))
        return Problem(self.dag.of_order(program), self.costs, self.budget_bytes, _made_for_all=self._made_for_all)


def _once(made: dict[object, Any], make: Callable[[Problem], _Made], problem: Problem) -> _Made:
    if make not in made:
        made[make] = make(problem)
    found: _Made = made[make]
    return found


@dataclass(frozen=True)
class Schedule:
    """A total order of the program's ops.

    Attributes:
        strategy: the strategy's spec string, such as ``latest_start{margin=1.25}``.
        order: every op name of the program exactly once.
        decisions: one for each collective that the strategy looked at.
    """

    strategy: str
    order: tuple[str, ...]
    decisions: tuple[Decision, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "order": list(self.order),
            "decisions": [{**asdict(d), "action": d.action.value} for d in self.decisions],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Schedule:
        decisions = tuple(Decision(**{**d, "action": Action(d["action"])}) for d in data["decisions"])
        return cls(data["strategy"], tuple(data["order"]), decisions)


class Strategy(Protocol):
    """A frozen dataclass of options with one method; its spec string is its repr everywhere."""

    name: str

    def schedule(self, problem: Problem) -> Schedule: ...
