"""``latest_start``: each gather as late as still hides it, each gradient reduced as soon as the lane is free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from overlap_pass.errors import OptionError
from overlap_pass.schedule.early import launch_early
from overlap_pass.schedule.explain import explain
from overlap_pass.schedule.feeding import Policy, feed
from overlap_pass.schedule.fitting import fit
from overlap_pass.schedule.ground import Ground
from overlap_pass.schedule.placement import Placement, place
from overlap_pass.schedule.room import Room
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.tail import hide_tail
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec

__all__ = ["LatestStart"]

_MARGINS = (1.0, 1.5, 2.5)
_AHEAD_SHARES = (0.0, 0.02, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class LatestStart:
    """Least memory for the same hidden time.

    A short ladder of policies (``schedule.feeding``) is tried, and launching early (``schedule.early``); among the orders whose exact peak keeps the budget the
    winner is chosen by

    1. score (``schedule.score``: the simulated step, also with slower communication);
    2. peak;
    3. place on the ladder.

    Options:
        margin: how many times its duration a gather is given before its first reader; 0 tries several.
    """

    name: ClassVar[str] = "latest_start"
    margin: float = 0.0

    def __post_init__(self) -> None:
        if self.margin < 0:
            raise OptionError(f"strategy latest_start: margin={self.margin} must be 0 (try several) or more")

    def schedule(self, problem: Problem) -> Schedule:
        placement = Placement.of(problem)
        room = Room.shared(problem)
        program = problem.program
        score = Score(problem)
        best: tuple[float, int, tuple[int, ...], str] | None = None
        for order, how in self._candidates(problem, placement, room, score):
            peak_bytes = score.peak_bytes(order)
            if not score.fits(peak_bytes):
                continue
            names = tuple(program.ops[p].name for p in order)
            found = (score.below(names, math.inf if best is None else best[0]), peak_bytes)
            if best is None or found < best[:2]:
                best = (*found, order, how)
        if best is None:  # nothing fits, not even the tight order: planning turns this into an error
            return Schedule(spec(self), tuple(program.ops[p].name for p in room.order))
        ended = hide_tail(problem, best[2], score)
        how = best[3] if ended == best[2] else f"{best[3]}, compute put off behind the last launch"
        return Schedule(spec(self), tuple(program.ops[p].name for p in ended), explain(placement, ended, how))

    def _candidates(
        self, problem: Problem, placement: Placement, room: Room, score: Score
    ) -> Iterator[tuple[tuple[int, ...], str]]:
        """Orders of the ladder, each distinct one once, the tight order last."""
        seen: set[tuple[int, ...]] = set()
        ground = Ground.shared(problem)
        step_us = sum(problem.costs.duration_us.values())
        for margin in (self.margin,) if self.margin else _MARGINS:
            for share in _AHEAD_SHARES:
                policy = Policy(margin, share * step_us)

                def fed(allowed_bytes: int | None, policy: Policy = policy) -> tuple[int, ...]:
                    return place(placement, feed(ground, policy, allowed_bytes))

                order = fit(fed, problem.budget_bytes, score)
                if order not in seen:
                    seen.add(order)
                    yield order, f"margin {margin:g}, up to {share:.0%} of the step ahead"

        def early(allowed_bytes: int | None) -> tuple[int, ...]:
            return place(placement, launch_early(placement, room, allowed_bytes))

        for order, how in (
            (fit(early, problem.budget_bytes, score), "as early as memory allows"),
            (room.order, "least memory"),
        ):
            if order not in seen:
                seen.add(order)
                yield order, how
