"""An order that was planned once, to be run again: of one graph, named by its digest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Program
from overlap_pass.schedule.coalescing import Group
from overlap_pass.schedule.types import Schedule

__all__ = ["Pinned", "checked"]

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One graph's order.

    Attributes:
        graph: its name, for messages.
        digest: of the program as it came (``Program.digest``).
        groups: launches that are joined.
        schedule: the order of the program with these joined. Of its decisions none is kept.
        launches: hash of the launches (``schedule.skeleton``), so that a file that was changed by hand is found out.
        activations_free: whether activation collectives were allowed to change places.
        offsets: where gathers by copy begin in the memory that the ranks share, if parameters lie there themselves.
    """

    graph: str
    digest: str
    groups: tuple[Group, ...]
    schedule: Schedule
    launches: str
    activations_free: bool = False
    offsets: tuple[tuple[str, int], ...] = ()

    def fits(self, program: Program) -> bool:
        return self.digest == program.digest

    def to_json(self) -> dict[str, Any]:
        return {
            "graph": self.graph,
            "digest": self.digest,
            "launches": self.launches,
            "activations_free": self.activations_free,
            "strategy": self.schedule.strategy,
            "joined": [list(group.members) for group in self.groups],
            "order": list(self.schedule.order),
            "offsets": dict(self.offsets),
        }

    @classmethod
    def from_json(cls, data: object) -> Pinned:
        """Raises ``PlanError`` for what is missing or of another kind."""
        joined = [Group(_names(members, "joined")) for members in checked(data, "joined", list)]
        schedule = Schedule(checked(data, "strategy", str), _names(checked(data, "order", list), "order"))
        graph, digest, launches = (checked(data, name, str) for name in ("graph", "digest", "launches"))
        places = checked(data, "offsets", dict)
        offsets = tuple((name, checked(places, name, int)) for name in places)
        free = checked(data, "activations_free", bool)
        return cls(graph, digest, tuple(joined), schedule, launches, free, offsets)


def checked(data: object, name: str, kind: type[_Kind]) -> _Kind:
    """A member of a JSON object, if it is of its kind.

    Raises:
        PlanError: it is not, or there is none.
    """
    value = data.get(name) if isinstance(data, Mapping) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{name!r} is missing or is no {kind.__name__}")
    return value


def _names(values: object, name: str) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or not all(isinstance(value, str) for value in values):
        raise PlanError(f"{name!r} holds something that is no name")
    return tuple(values)
