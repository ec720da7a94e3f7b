"""What goes into a strategy and what comes out: ``Problem`` → ``Schedule``."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import DepGraph
from overlap_pass.graph.program import Program

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

    @property
    def program(self) -> Program:
        return self.dag.program

    def once(self, make: Callable[[Problem], _Made]) -> _Made:
        """What ``make`` makes of the graph and its prices (the budget, it may not look at): made once for this problem and its
        copies with another budget."""
        if make not in self._made:
            self._made[make] = make(self)
        found: _Made = self._made[make]
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
