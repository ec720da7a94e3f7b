"""The launches of an order, one line each: what all ranks of a communicator must agree on, and where two do not.

A line says who talks (communicator, how many ranks), what (kind, dtype, bytes, carrier), for whom (the parameter) and where
it lies in shared memory, if that is settled; of activation collectives no bytes, which are those of a rank's batch. Ranks whose lines are the same launch the same
collectives in the same order; the hash of the lines is the plan's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from overlap_pass.graph.program import Collective, Lease, Program, Role

__all__ = ["difference", "hash_of", "lines_of"]

_CONTEXT = 3


def lines_of(program: Program, order: Sequence[str]) -> tuple[str, ...]:
    """A line for each launch, in the order in which they run."""
    lines = []
    for name in order:
        collective = program.op(name).collective
        if collective is not None:
            lines.append(_line_of(collective) + _place_of(program.leases.get(name)))
    return tuple(lines)


def _place_of(lease: Lease | None) -> str:
    if lease is None:
        return ""
    final = "".join(str(int(one)) for one in lease.final)
    return f", at {lease.offset_bytes} B of shared memory ({final})"


def _line_of(collective: Collective) -> str:
    size = "of the batch" if collective.role is Role.ACTIVATION else f"{collective.payload_bytes} B"
    carrier = " by copy engines" if collective.by_copy else ""
    whose = collective.parameter or collective.unit
    return (
        f"{collective.kind} on {collective.group} ({collective.group_size} ranks): {size} {collective.dtype}{carrier}"
        f"{f', {whose}' if whose else ''}"
    )


def hash_of(lines: Sequence[str]) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def difference(orders: Mapping[str, Sequence[str]]) -> str:
    """Two orders side by side around the first launch in which they differ.

    Args:
        orders: who → lines, for two that are not the same.
    """
    one, other = orders.values()
    length = max(len(one), len(other))
    first = next(n for n in range(length) if _line(one, n) != _line(other, n))
    shown = range(max(0, first - _CONTEXT), min(length, first + _CONTEXT + 1))
    text = [f"first difference at launch {first + 1} of {len(one)} and {len(other)}:"]
    for who, lines in orders.items():
        text.append(f"  {who}")
        text += [f"  {'>' if n == first else ' '} {n + 1:>4} {_line(lines, n)}" for n in shown]
    return "\n".join(text)


def _line(lines: Sequence[str], number: int) -> str:
    return lines[number] if number < len(lines) else "(no more launches)"
