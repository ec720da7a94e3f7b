"""What a schedule in the making holds beyond the tight order, boundary by boundary.

The tight order gathers at the first reader and reduces at once. Beyond it an order holds

- gathers launched ahead, until the tight order would gather them too;
- inputs of reductions in flight, until their wait;
- gradients that the tight order would have reduced by now.

Each is counted with the cast that leads to it. All of it comes on top of what the tight order holds, so it fits where
it is no more than what the budget leaves there (:class:`~overlap_pass.schedule.room.Room`). Heads and tails make that an
estimate, mostly from above; the exact peak is taken of the finished order.
"""

from __future__ import annotations

from overlap_pass.graph.program import Role
from overlap_pass.schedule.ground import Boundary, Ground
from overlap_pass.schedule.placement import Move

__all__ = ["Held"]


class Held:
    """Bytes beyond the tight order, as launches and waits are decided.

    Attributes:
        extra_bytes: held now.
        overdue: reductions that the tight order has launched by now and this one has not, by launch, oldest first.
    """

    def __init__(self, ground: Ground, budget_bytes: int | None) -> None:
        self._ops, self._bytes = ground.placement.program.ops, ground.bytes
        self._room, self._budget_bytes = ground.room, budget_bytes
        self._due_at = ground.due_at
        self.extra_bytes = 0
        self.overdue: dict[int, Move] = {}
        self._launched: set[int] = set()
        self._until: dict[int, int] = {}

    def arrive(self, boundary: Boundary) -> None:
        """Come to the boundary before an anchor."""
        self.extra_bytes -= self._until.pop(boundary.position, 0)
        for move in boundary.due:
            if move.launch not in self._launched:
                self.extra_bytes += self._bytes[move.launch].waiting
                self.overdue[move.launch] = move

    def launch(self, move: Move, position: int) -> None:
        """A collective is launched at the boundary before the anchor at ``position``."""
        op = self._ops[move.launch]
        self._launched.add(move.launch)
        if move.role is Role.PARAMETER:
            if move.deadline > position:
                size_bytes = self._bytes[move.launch].gathered
                self.extra_bytes += size_bytes
                self._until[move.deadline] = self._until.get(move.deadline, 0) + size_bytes
            return
        self.extra_bytes += op.read_bytes
        if self.overdue.pop(move.launch, None) is not None:
            self.extra_bytes -= self._bytes[move.launch].waiting

    def wait(self, move: Move) -> None:
        """A reduction is waited for."""
        self.extra_bytes -= self._ops[move.launch].read_bytes

    def gather_fits(self, move: Move, position: int) -> bool:
        if self._budget_bytes is None:
            return True
        needed_bytes = self._bytes[move.launch].gathered + self.extra_bytes
        return needed_bytes <= self._budget_bytes - self._room.most_live(position, move.deadline)

    def reduction_fits(self, move: Move, boundary: Boundary) -> bool:
        """Whether the casts and the result of a reduction have room at a boundary, beside its gradient."""
        position = boundary.position
        if self._budget_bytes is None or self._due_at.get(move.launch, position) == position:
            return True  # no bound, or counted in the tight order
        needed_bytes = self._bytes[move.launch].made + self.extra_bytes
        return needed_bytes <= self._budget_bytes - self._room.most_live(position, position + 1)

    def too_much(self, boundary: Boundary) -> bool:
        """Whether what is held is too much for some anchor from this boundary to the next."""
        return self._budget_bytes is not None and self.extra_bytes > self._budget_bytes - boundary.most_live
