"""Launching early: every gather as far ahead as memory allows, without a look at prices."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from overlap_pass.graph.program import OpNode, Role
from overlap_pass.schedule.placement import BEFORE, WAITS, Key, Move, Placement
from overlap_pass.schedule.room import Room

__all__ = ["launch_at_once", "launch_early"]


def launch_early(placement: Placement, room: Room, budget_bytes: int | None) -> dict[int, Key]:
    """Wishes (see ``placement.place``) for every launch and every gradient's wait.

    1. Gathers, in the order of their first readers: each is launched as far ahead of its reader as every op in
       between leaves room for it, but not before the gather before it on the same communicator.
    2. Reductions are launched where the tight order has them; each is waited for as far behind that as its input still
       has room, so that compute is blocked by none that could run on.
    """
    stock = _Stock(placement, room, budget_bytes)
    wishes = dict(room.wishes)
    moves = placement.moves
    front: dict[str, int] = {}
    gathers = sorted((m for m in moves if m.role is Role.PARAMETER), key=lambda m: (m.deadline, m.launch))
    for sequence, move in enumerate(gathers):
        at = stock.back_from(move.deadline, max(move.release, front.get(move.group, 0)), _gathered(stock.ops, move))
        front[move.group] = at
        wishes[move.launch] = (at, BEFORE, sequence)
    reductions = [move for move in moves if move.role is Role.GRADIENT]
    for sequence, move in enumerate(reductions, start=len(gathers)):
        start = room.wishes[move.launch][0]
        wishes[move.launch] = (start, BEFORE, sequence)
        until = stock.on_from(start, stock.ops[move.launch].read_bytes)
        wishes.update(dict.fromkeys(move.waits, (until, WAITS, sequence)))
    return wishes


def launch_at_once(placement: Placement) -> dict[int, Key]:
    """Wishes that launch everything as soon as it may be and wait for reductions at the end: what no memory bounds."""
    wishes: dict[int, Key] = {}
    last = len(placement.program.ops) - 1
    for sequence, move in enumerate(placement.moves):
        wishes[move.launch] = (move.release, BEFORE, sequence)
        if move.role is Role.GRADIENT:
            wishes.update(dict.fromkeys(move.waits, (last, WAITS, sequence)))
    return wishes


def _gathered(ops: tuple[OpNode, ...], move: Move) -> int:
    """What a gather in flight holds: its result, and its shard where a cast made one."""
    op = ops[move.launch]
    return op.written_bytes + (op.read_bytes if move.head else 0)


class _Stock:
    """Bytes left at each anchor, handed out piece by piece."""

    def __init__(self, placement: Placement, room: Room, budget_bytes: int | None) -> None:
        self.ops, self._anchors = placement.program.ops, placement.anchors
        self._left = None if budget_bytes is None else budget_bytes - np.array(room.live_bytes, dtype=np.int64)

    def back_from(self, last: int, first: int, size_bytes: int) -> int:
        """The earliest anchor from ``first`` on such that it and all up to ``last`` have room; takes that room."""
        low, high = self._index(first), self._index(last)
        if self._left is None or low >= high:
            return self._anchors[min(low, high) if self._left is None else high]
        full = (self._left[low:high] < size_bytes).nonzero()[0]
        at = low + (int(full[-1]) + 1 if len(full) else 0)
        self._left[at:high] -= size_bytes
        return self._anchors[at]

    def on_from(self, first: int, size_bytes: int) -> int:
        """The latest anchor such that ``first`` and all before it have room; takes that room."""
        at, end = self._index(first), len(self._anchors) - 1
        if self._left is None:
            return self._anchors[end]
        full = (self._left[at:end] < size_bytes).nonzero()[0]
        until = at + int(full[0]) if len(full) else end
        self._left[at:until] -= size_bytes
        return self._anchors[until]

    def _index(self, position: int) -> int:
        return min(bisect_left(self._anchors, position), len(self._anchors) - 1)
