"""A limit on communicators in flight, as dependencies.

A communicator is in flight while one of its launches is not waited for. In a given order of launches those launched on last
may be, as many as the limit says; before a launch on one more, everything on the communicator that was launched on longest
ago is waited for::

    launches, at most 2     g0      g1      g0      g2               g1
    waited for before it                            all of g1        all of g0

That depends on the order of launches alone, so that ranks which agree on that agree on this.
"""

from __future__ import annotations

from overlap_pass.graph.program import Program

__all__ = ["waited_before"]


def waited_before(program: Program) -> dict[str, tuple[str, ...]]:
    """Launch → waits that must stand before it, given the program's order of launches; empty without a limit."""
    if program.most_in_flight is None:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    running: dict[str, list[str]] = {}  # communicator → its launches, the one launched on longest ago first
    for op in program.launches:
        if op.collective is None:
            continue
        group = op.collective.group
        running[group] = [*running.pop(group, []), op.name]
        if len(running) > program.most_in_flight:
            over = running.pop(next(iter(running)))
            found[op.name] = tuple(wait for launch in over for wait in program.waits_of[launch])
    return found
