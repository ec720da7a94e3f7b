"""One order of launches on every rank, fixed before any price is looked at.

Ranks plan alone and must launch alike: a communicator whose members launch in different orders hangs, and so can two
communicators with members in common. But ranks need not compute alike. Batches differ in shape, one rank pads, one
recompiles: its prices, its memory and its number of ops are its own. So the order of launches is made of what no rank can
see differently:

- which collectives there are, on which communicator, and how large they are;
- the order as written of their *events*: a gather's first reader, the op that a reduction waits for (or behind which it was
  written, where that is later), an activation collective itself.

Events come in an order, not at a time, so that neither a size nor a number of ops between two of them counts::

    events       use a   sum 1   use b   sum 2   use c   sum 3           gathers a b c, reductions 1 2 3
    launches     a       b 1             c 2             3               room for one gather ahead

Reductions and activation collectives keep their places among the events. Gathers go in the order of their first readers,
each ahead of as many other launches as leave room: what is gathered ahead of its reader at any of them stays within an
allowance of bytes. Everything else, at which op each launch stands above all, is decided by price and memory, rank by rank.

The allowance is one FSDP unit (as FSDP2 prefetches), 256 MiB at least. Where the budget says how much it adds to the order
as written (``fsdp2``, ``+2GiB``), the order must also *add* no more than that, counted in tensors that every rank has in the
same size (:func:`added_bytes`); so it fits beside any rank's activations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.once import keep, once
from overlap_pass.graph.program import OpKind, OpNode, Program, Role
from overlap_pass.memory.ledger import Lifetimes
from overlap_pass.memory.staging import staging_bytes
from overlap_pass.schedule.placement import AFTER, ANCHOR, BEFORE, WAITS, Key, Move, Placement, place

__all__ = ["COMPUTE_PER_TRAFFIC", "added_bytes", "agreed", "reference_compute_us", "reference_costs"]

_LEAST_ALLOWANCE_BYTES = 256 * 2**20
"""Ahead of their readers even where units are small: an NVLink carries that much in about a millisecond."""

COMPUTE_PER_TRAFFIC = (0.5, 1.0, 3.0)
"""Steps that are looked at where a rank's own must not be: of mostly traffic, as on hundreds of ranks, of half, and of little."""


def agreed(program: Program, share: float = 1.0, *, as_written: bool = False) -> Program:
    """The program in an order whose launches depend on collectives and on the order of their events alone.

    Args:
        share: of the allowance that gathers may use.
        as_written: reductions go where they were written, not as soon as their input exists.
    """
    placement = Placement.of_program(program)
    events = once(placement, _events_as_written if as_written else _events)
    ahead_of = _ahead_of(program, events, int(share * allowance(program)))
    order = place(placement, _wishes(placement, events, ahead_of))
    ordered = replace(program, ops=tuple(program.ops[position] for position in order), launches_fixed=True)
    keep(ordered, Lifetimes, once(program, Lifetimes).of_order(order))
    return ordered


def allowance(program: Program) -> int:
    """Bytes that gathers may be ahead where memory is no object: the largest unit, at least 256 MiB."""
    unit_bytes: Counter[str] = Counter()
    for op in program.launches:
        if op.collective is not None and op.collective.role is Role.PARAMETER:
            unit_bytes[op.collective.unit or f"launch {op.name}"] += op.collective.payload_bytes
    return max(_LEAST_ALLOWANCE_BYTES, *unit_bytes.values(), 0)


def added_bytes(written: Program, order: Program) -> int:
    """The most that ``order`` holds above ``written``, where both compute in the same order.

    Counted are the tensors that travel (shards and gradients, what is cast of them, sent, received and cut to size); the
    others are the same in both. Ops that make or read one of these are compared one by one, and what is held between two of
    them as a whole.
    """
    travel = once(written, _Travel.of)
    held = travel.most_held(order)
    return max(0, *(later - before for before, later in zip(travel.held_bytes, held, strict=True)))


@dataclass(frozen=True)
class _Travel:
    """The tensors of a program that travel, and what its order as written holds of them.

    Attributes:
        storages: their ids.
        stops: the ops that make or read one of them and keep their order.
        held_bytes: see :meth:`most_held`.
    """

    storages: frozenset[int]
    stops: frozenset[str]
    held_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, written: Program) -> _Travel:
        placement = Placement.of_program(written)
        free = [written.ops[position] for position in placement.free]
        storages = {storage for op in free for storage in written.touched(op)}
        fixed = {move.launch: move for move in placement.moves if move.launch not in placement.free}
        for launch in fixed:
            storages -= written.touched(written.ops[launch])
        places = [p for p in placement.anchors if p in fixed or written.touched(written.ops[p]) & storages]
        waits = (wait for move in fixed.values() for wait in move.waits)
        found = cls(frozenset(storages), frozenset(written.ops[p].name for p in (*places, *waits)))
        return replace(found, held_bytes=tuple(found.most_held(written)))

    def most_held(self, program: Program) -> list[int]:
        """Bytes of theirs held at most, alternately between two stops and by one of them, in the order of the program."""
        lifetimes = once(program, Lifetimes)
        allocated, live_bytes = self._allocated(program), staging_bytes(program)
        live_bytes += allocated.pop(-1, 0)
        remaining = list(lifetimes.uses)
        most_bytes = [live_bytes]
        for position, op in enumerate(program.ops):
            while_bytes = live_bytes = live_bytes + allocated.get(position, 0)
            for storage in lifetimes.touches[position]:
                remaining[storage] -= 1
                if not remaining[storage] and storage in self.storages:
                    live_bytes -= lifetimes.size_bytes[storage]
            if op.name in self.stops:
                most_bytes += [while_bytes, live_bytes]
            else:
                most_bytes[-1] = max(most_bytes[-1], while_bytes)
        return most_bytes

    def _allocated(self, program: Program) -> dict[int, int]:
        """Position → bytes of theirs that the op allocates; -1 → what is there from the start."""
        found: dict[int, int] = {}
        for storage in program.storages:
            if storage.id in self.storages:
                position = program.index[storage.owner]
                given = program.ops[position].kind is OpKind.INPUT
                found[-1 if given else position] = found.get(-1 if given else position, 0) + storage.size_bytes
        return found


def reference_compute_us(written: Program, costs: CostTable) -> Mapping[str, float]:
    """Op → how long what is gathered for it and reduced after it travels, alone: a measure of its work that all ranks share."""
    placement = Placement.of_program(written)
    found: defaultdict[str, float] = defaultdict(float)
    for event in once(placement, _events):
        launch, anchor = written.ops[event.move.launch], written.ops[event.anchor]
        if _shared(launch) and anchor.collective is None:
            found[anchor.name] += costs.duration_us[launch.name]
    return found


def reference_costs(program: Program, costs: CostTable, compute_us: Mapping[str, float]) -> CostTable:
    """Prices that are the same on every rank, to compare orders of one graph with.

    Gathers and reductions keep theirs; activation collectives, whose sizes are those of a rank's batch, take no time. Of the
    CPU's time only that for launches counts.

    Args:
        compute_us: of the ops that take time; the same for all that is compared, however launches are joined.
    """
    shared = {op.name for op in program.launches if _shared(op)}
    duration_us = {op.name: costs.duration_us[op.name] if op.name in shared else 0.0 for op in program.ops}
    launch_us = {op.name: costs.launch_us[op.name] if op.name in shared else 0.0 for op in program.ops}
    return replace(costs, duration_us={**duration_us, **compute_us}, launch_us=launch_us, cpu_ahead_us=0.0)


def _shared(launch: OpNode) -> bool:
    """Whether a collective is of the same size on all ranks."""
    return launch.collective is not None and launch.collective.role is not Role.ACTIVATION


@dataclass(frozen=True, slots=True)
class _Event:
    """Where a collective's launch belongs if nothing is ahead of time.

    Attributes:
        anchor: position of the op: first reader, last source, or the launch itself; -1 before all ops.
        rank: on which side of that op.
    """

    anchor: int
    rank: int
    move: Move

    @property
    def place(self) -> tuple[int, int, int]:
        return (self.anchor, self.rank, self.move.launch)


def _events(placement: Placement) -> Sequence[_Event]:
    """Reductions as soon as their input exists."""
    return _events_of(placement, as_written=False)


def _events_as_written(placement: Placement) -> Sequence[_Event]:
    """Reductions where they were written, which holds less where casts of gradients are large and memory falls."""
    return _events_of(placement, as_written=True)


def _events_of(placement: Placement, *, as_written: bool) -> Sequence[_Event]:
    found, anchors = [], placement.anchors
    for move in placement.moves:
        if move.launch not in placement.free:
            found.append(_Event(move.launch, ANCHOR, move))
        elif move.role is Role.PARAMETER:
            found.append(_Event(move.deadline, BEFORE, move))
        else:
            behind = anchors[bisect_left(anchors, move.launch) - 1] if as_written and move.launch > anchors[0] else -1
            found.append(_Event(max(move.release - 1, behind), AFTER, move))
    return sorted(found, key=lambda event: event.place)


def _wishes(placement: Placement, events: Sequence[_Event], ahead_of: Mapping[int, int]) -> dict[int, Key]:
    """Wishes (see ``placement.place``) that put all launches into the agreed order."""
    wishes: dict[int, Key] = {}
    for sequence, (event, (anchor, rank)) in enumerate(_sequence(events, ahead_of)):
        if event.rank == ANCHOR:  # so that what it sends dies when it did
            wishes.update({wait: (wait, WAITS, 0) for wait in event.move.waits})
            continue
        wishes[event.move.launch] = (anchor, rank, sequence)
        if event.move.role is not Role.PARAMETER:
            wishes.update(dict.fromkeys(event.move.waits, (anchor, rank, sequence)))
    return wishes


def _sequence(events: Sequence[_Event], ahead_of: Mapping[int, int]) -> Iterator[tuple[_Event, tuple[int, int]]]:
    """Events in the agreed order of their launches, each with the anchor and the side of it where its launch goes.

    Args:
        ahead_of: gather's launch → number of the first other event that it is launched ahead of, ascending along the gathers.
    """
    others = [event for event in events if not _gathers(event)]
    waiting = [event for event in reversed(events) if _gathers(event)]
    for number, other in enumerate(others):
        while waiting and ahead_of[waiting[-1].move.launch] <= number:
            gather = waiting.pop()
            before_other = (other.anchor, BEFORE if other.rank == ANCHOR else other.rank)
            yield gather, min((gather.anchor, gather.rank), before_other)
        yield other, (other.anchor, other.rank)
    for gather in reversed(waiting):
        yield gather, (gather.anchor, gather.rank)


def _gathers(event: _Event) -> bool:
    return event.move.role is Role.PARAMETER and event.rank != ANCHOR


def _ahead_of(program: Program, events: Sequence[_Event], allowance_bytes: int) -> Mapping[int, int]:
    """Gather's launch → number of the first other event that it is launched ahead of."""
    places = [event.place for event in events if not _gathers(event)]
    left_bytes = [allowance_bytes] * len(places)
    found: dict[int, int] = {}
    front = 0
    for gather in filter(_gathers, events):
        size_bytes = _payload_bytes(program, gather.move)
        exists = bisect_left(places, (gather.move.release - 1, AFTER, -1)) if gather.move.release else 0
        at = bisect_left(places, gather.place)
        while at > max(front, exists) and left_bytes[at - 1] >= size_bytes:
            at -= 1
            left_bytes[at] -= size_bytes
        found[gather.move.launch] = front = max(at, front)
    return found


def _payload_bytes(program: Program, move: Move) -> int:
    collective = program.ops[move.launch].collective
    return 0 if collective is None else collective.payload_bytes
