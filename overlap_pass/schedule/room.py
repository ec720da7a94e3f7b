"""How much memory a budget leaves over a stretch of the compute order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from overlap_pass.graph.once import once
from overlap_pass.graph.program import Program, Role
from overlap_pass.memory.ledger import Lifetimes
from overlap_pass.schedule.placement import BEFORE, Key, Placement, place
from overlap_pass.schedule.types import Problem

__all__ = ["Room", "least_bytes", "tight"]


def tight(placement: Placement, *, as_written: bool = False) -> dict[int, Key]:
    """Wishes of the order that holds least: gathers at their first reader, reductions waited for where they start.

    Args:
        as_written: reductions start where they were written rather than as soon as their input exists. That holds less
            where a cast of the gradient is larger than the gradient and something large dies soon.
    """
    wishes: dict[int, Key] = {}
    for sequence, move in enumerate(placement.moves):
        if move.role is Role.PARAMETER:
            wishes[move.launch] = (move.deadline, BEFORE, sequence)
        elif move.role is Role.GRADIENT:
            at = max(move.release, move.launch) if as_written else move.release
            wishes[move.launch] = (at, BEFORE, sequence)
            wishes.update(dict.fromkeys(move.waits, (at, BEFORE, sequence)))
    return wishes


@dataclass(frozen=True)
class Room:
    """Bytes live at each anchor of the tight order (what any order that keeps the compute order must at least hold).

    Attributes:
        anchors: positions of the anchors, ascending.
        live_bytes: the most that is live from behind the anchor before until each anchor has run, in the tight order.
        smallest_bytes: the peak of the tight order.
        wishes: the tight order's wishes (see ``placement.place``).
        order: the tight order, by position.
    """

    anchors: tuple[int, ...]
    live_bytes: tuple[int, ...]
    smallest_bytes: int
    wishes: Mapping[int, Key]
    order: tuple[int, ...]

    @classmethod
    def shared(cls, problem: Problem) -> Room:
        """The problem's, made once for all of its budgets."""
        return once(Placement.of(problem), Room.of)

    @classmethod
    def of(cls, placement: Placement) -> Room:
        """The better of the two tight orders."""
        lifetimes = once(placement.program, Lifetimes)
        rooms = [cls._after(placement, lifetimes, tight(placement, as_written=written)) for written in (False, True)]
        return min(rooms, key=lambda room: room.smallest_bytes)

    @classmethod
    def _after(cls, placement: Placement, lifetimes: Lifetimes, wishes: Mapping[int, Key]) -> Room:
        order = place(placement, wishes)
        live_bytes, _ = lifetimes.live_bytes(order)
        anchors = np.array(placement.anchors, dtype=np.int64)
        ends = np.flatnonzero(np.isin(order, anchors)) + 1  # behind each anchor; they keep their order
        starts = np.concatenate(([0], ends[:-1])) if len(ends) else ends
        most_bytes = np.maximum.reduceat(live_bytes[: ends[-1]], starts).tolist() if len(ends) else []
        peak_bytes = max(lifetimes.start_bytes, int(live_bytes.max(initial=0)))
        return cls(placement.anchors, tuple(most_bytes), peak_bytes, wishes, order)

    def most_live(self, first: int, last: int) -> int:
        """Bytes live at most at the anchors in ``[first, last)``; 0 where there are none."""
        low, high = self._number[first], self._number[last]
        if low >= high:
            return 0
        level = (high - low).bit_length() - 1
        row = self._highest[level]
        return max(row[low], row[high - (1 << level)])

    @cached_property
    def _number(self) -> tuple[int, ...]:
        """For each position, and one behind the last, how many anchors stand before it."""
        ends = zip((-1, *self.anchors), (*self.anchors, len(self.order)), strict=True)
        return tuple(itertools.chain.from_iterable([number] * (end - at) for number, (at, end) in enumerate(ends)))

    @cached_property
    def _highest(self) -> tuple[tuple[int, ...], ...]:
        """Row k: the most that is live over 2**k anchors from each one on, so that a range is two look-ups."""
        rows = [np.array(self.live_bytes, dtype=np.int64)]
        width = 1
        while 2 * width <= len(self.live_bytes):
            row = rows[-1]
            rows.append(np.maximum(row[:-width], row[width:]))
            width *= 2
        return tuple(tuple(row.tolist()) for row in rows)


def least_bytes(program: Program) -> int:
    """Of the order as written and that of least memory, without what is held beside the graph."""
    written_bytes = once(program, Lifetimes).peak_bytes(range(len(program.ops)))
    return min(written_bytes, once(Placement.of_program(program), Room.of).smallest_bytes)
