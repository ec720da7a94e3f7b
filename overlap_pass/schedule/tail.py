"""The end of a backward: compute that can wait runs beside the last reduction instead of in front of it.

The last gradient of a backward (an embedding's, often the largest) is reduced when all compute is done, with nothing left to
hide it. But the weight gradients just before it are not needed for it::

    as found   … dX  dW dW dW  dE ░░░░░░░      dE is reduced, exposed
    behind it  … dX  dE  dW dW dW ░            dE is reduced beside dW
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    fillers = _fillers(problem, order[: order.index(last)], last, max(_AMOUNTS) * exposed_us)
    for amount in _AMOUNTS:
        found = _put_off(problem, order, last, _worth(problem, fillers, amount * exposed_us))
        found_us = score.below(found, best_us)
        if found_us < best_us and score.fits(score.peak_bytes(found)):
            best, best_us = found, found_us
    return best


def _last_launch(problem: Problem, order: Sequence[int]) -> int | None:
    """The launch of the gradient that is launched last."""
    launches = (p for p in reversed(order) if problem.program.ops[p].collective is not None)
    return next(launches, None)


def _put_off(problem: Problem, order: Sequence[int], launch: int, fillers: Iterable[int]) -> tuple[int, ...]:
    """Compute that the launch does not need, with all that depends on it, right behind the launch."""
    at, moved = order.index(launch), set(fillers)
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


def _fillers(problem: Problem, before: Sequence[int], launch: int, wanted_us: float) -> list[int]:
    """The last compute in front of the launch that it does not depend on, latest first, until it is enough."""
    ops, duration_us, predecessors = problem.program.ops, problem.costs.duration_us, problem.dag.predecessors
    needed, found = set(predecessors[launch]), []
    for position in reversed(before):
        if wanted_us <= 0:
            break
        op = ops[position]
        if position in needed:
            needed.update(predecessors[position])
        elif op.kind is OpKind.COMPUTE and duration_us[op.name] > 0:
            wanted_us -= duration_us[op.name]
            found.append(position)
    return found


def _worth(problem: Problem, fillers: Sequence[int], wanted_us: float) -> Iterator[int]:
    """The first of them that are enough."""
    for position in fillers:
        if wanted_us <= 0:
            return
        wanted_us -= problem.costs.duration_us[problem.program.ops[position].name]
        yield position
