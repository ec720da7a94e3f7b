"""The end of a backward: compute that can wait runs beside the last reduction instead of in front of it.

The last gradient of a backward (an embedding's, often the largest) is reduced when all compute is done, with nothing left to
hide it. But the weight gradients just before it are not needed for it::

    as found   … dX  dW dW dW  dE ░░░░░░░      dE is reduced, exposed
    behind it  … dX  dE  dW dW dW ░            dE is reduced beside dW
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overlap_pass.graph.program import OpKind
from overlap_pass.schedule.score import Score
from overlap_pass.schedule.types import Problem

__all__ = ["hide_tail"]

_AMOUNTS = (1.0, 1.5)
"""How much compute is put off, in times of what is exposed: communication may be slower than its price."""
_WORTH = 0.001
"""Share of the step that the end must be exposed for."""


def hide_tail(problem: Problem, order: Sequence[int], score: Score) -> tuple[int, ...]:
    """The order with some compute behind the launch whose wait ends the step, if that is better and fits; else itself.

    Args:
        problem: what is scheduled.
        order: positions, legal.
        score: the judge, with the problem's budget.
    """
    best, best_us = tuple(order), score.of(order)
    last = _last_launch(problem, order)
    if last is None:
        return best
    exposed_us = score.blocked_us(order)[problem.program.ops[last].name]
    if exposed_us < _WORTH * score.step_us(order):
        return best
    for amount in _AMOUNTS:
        found = _put_off(problem, order, last, amount * exposed_us)
        found_us = score.below(found, best_us)
        if found_us < best_us and score.fits(score.peak_bytes(found)):
            best, best_us = found, found_us
    return best


def _last_launch(problem: Problem, order: Sequence[int]) -> int | None:
    """The launch of the gradient that is launched last."""
    launches = (p for p in reversed(order) if problem.program.ops[p].collective is not None)
    return next(launches, None)


def _put_off(problem: Problem, order: Sequence[int], launch: int, wanted_us: float) -> tuple[int, ...]:
    """Compute worth ``wanted_us`` that the launch does not need, with all that depends on it, right behind the launch."""
    at = order.index(launch)
    moved = set(_fillers(problem, order[:at], launch, wanted_us))
    first = next((step for step, position in enumerate(order[:at]) if position in moved), at)
    todo, between = list(moved), order[first:at]
    movable = set(between)
    while todo:
        for reader in problem.dag.successors[todo.pop()]:
            if reader in movable and reader not in moved:
                moved.add(reader)
                todo.append(reader)
    kept = [position for position in between if position not in moved]
    behind = [position for position in between if position in moved]
    return (*order[:first], *kept, launch, *behind, *order[at + 1 :])


def _fillers(problem: Problem, before: Sequence[int], launch: int, wanted_us: float) -> Iterator[int]:
    """The last compute in front of the launch that it does not depend on, latest first, until it is enough."""
    needed = {launch}
    for position in reversed(before):
        if wanted_us <= 0:
            return
        op = problem.program.ops[position]
        if not needed.isdisjoint(problem.dag.successors[position]):
            needed.add(position)
        elif op.kind is OpKind.COMPUTE and problem.costs.duration_us[op.name] > 0:
            wanted_us -= problem.costs.duration_us[op.name]
            yield position
