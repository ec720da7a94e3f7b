"""Plans in a folder, a file for each rank: what ``save_plan`` writes and ``plan`` reads.

A rank has a file of its own because its graphs are its own: shards are uneven, and names of ops follow what a rank computes.
A file is JSON and is read as such. Its name holds nothing but the rank's number and how many there are, so a plan for
another number of ranks is not found; what else it was made for stands in it, and is compared.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlap_pass import __version__
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Program
from overlap_pass.planning import Plan
from overlap_pass.schedule.pinned import Pinned, checked

__all__ = ["SavedPlans", "pinned"]

_FORMAT = 2


@dataclass(frozen=True, slots=True)
class SavedPlans:
    """The plans of one rank.

    Attributes:
        rank, ranks: whose they are.
        plans: in the order in which they were made, of each graph one.
    """

    rank: int
    ranks: int
    plans: tuple[Pinned, ...] = ()

    @classmethod
    def load(cls, folder: Path, rank: int, ranks: int) -> SavedPlans:
        """Read the file of a rank.

        Raises:
            PlanError: there is none for so many ranks, it is damaged, or another version wrote it.
        """
        path = folder / _name(rank, ranks)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            others = sorted(other.name for other in folder.glob("rank-0-of-*.json"))
            found = (
                f"it holds plans for other numbers of ranks: {', '.join(others)}" if others else "write it by save_plan"
            )
            raise PlanError(f"no plan in {str(path)!r} ({_reason(error)}); {found}") from error
        try:
            return cls._read(json.loads(text), rank, ranks)
        except (json.JSONDecodeError, RecursionError) as error:
            raise PlanError(f"the plan in {str(path)!r} is no JSON: {error}; save it again") from error
        except PlanError as error:
            raise PlanError(f"the plan in {str(path)!r} cannot be used: {error}; save it again") from error

    @classmethod
    def _read(cls, data: Any, rank: int, ranks: int) -> SavedPlans:
        version, form = checked(data, "overlap_pass", str), checked(data, "format", int)
        if (version, form) != (__version__, _FORMAT):
            raise PlanError(
                f"overlap-pass {version} wrote it (format {form}), this is {__version__} (format {_FORMAT})"
            )
        whose = (checked(data, "rank", int), checked(data, "ranks", int))
        if whose != (rank, ranks):
            raise PlanError(f"it is for rank {whose[0]} of {whose[1]}, this is rank {rank} of {ranks}")
        return cls(rank, ranks, tuple(Pinned.from_json(plan) for plan in checked(data, "plans", list)))

    def of(self, program: Program) -> Pinned:
        """The plan of a graph.

        Raises:
            PlanError: there is none.
        """
        for plan in self.plans:
            if plan.fits(program):
                return plan
        held = ", ".join(f"{plan.graph} {plan.digest[:12]}" for plan in self.plans) or "none"
        raise PlanError(
            f"the saved plans are of other graphs: {program.name} {program.digest[:12]} with {len(program.ops)} ops is not among "
            f"{held}. Model, shapes, backend, torch or an option that changes the graph are not those of the run that saved "
            "them: save them again"
        )

    def with_plans(self, plans: Sequence[Pinned]) -> SavedPlans:
        """These and what was there of other graphs."""
        new = {plan.digest for plan in plans}
        return replace(self, plans=(*(plan for plan in self.plans if plan.digest not in new), *plans))

    def save(self, folder: Path) -> None:
        """Write the rank's file, whole or not at all.

        Raises:
            OSError: the folder cannot be written to.
        """
        folder.mkdir(exist_ok=True)
        path = folder / _name(self.rank, self.ranks)
        unfinished = path.with_suffix(".part")
        unfinished.write_text(self._text(), encoding="utf-8")
        os.replace(unfinished, path)

    @property
    def digest(self) -> str:
        """SHA-256 of all that is in it."""
        return hashlib.sha256(self._text().encode()).hexdigest()

    def _text(self) -> str:
        head = {"overlap_pass": __version__, "format": _FORMAT, "rank": self.rank, "ranks": self.ranks}
        return json.dumps({**head, "plans": [plan.to_json() for plan in self.plans]}, indent=1) + "\n"


def pinned(program: Program, plan: Plan) -> Pinned:
    """A plan as it is saved, of the program as it came."""
    order = replace(plan.schedule, decisions=())
    free = plan.program.activations_free
    offsets = tuple((name, lease.offset_bytes) for name, lease in plan.program.leases.items())
    return Pinned(program.name, program.digest, plan.coalesced, order, plan.skeleton, free, offsets)


def _name(rank: int, ranks: int) -> str:
    return f"rank-{rank:d}-of-{ranks:d}.json"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
