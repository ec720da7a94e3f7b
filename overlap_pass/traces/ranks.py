"""The same collective on several ranks: who waited for whom.

A kernel of a collective that starts early spins until the last rank has started; from there on bytes travel::

    rank 0         ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
    rank 1                     ▒▒▒▒▒▒▒▒▒
                   └── wait ──┘└transfer┘
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_pass.traces.collectives import Match

__all__ = ["RankCollective", "Waits", "find_waits"]

SAME_CLOCK_NS = 50_000
"""Collectives end on all ranks within this, so clocks that differ by more are not the same clock."""


@dataclass(frozen=True, slots=True)
class RankCollective:
    """One collective as one rank saw it, on the clock of its machine.

    Attributes:
        step: its step, ``None`` where the trace has none.
        match: what it is called on all ranks.
        start_ns, end_ns: half-open.
    """

    step: int | None
    match: Match
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Waits:
    """What matching the ranks gave.

    Attributes:
        waits_ns: for each rank, for each of its collectives, how long it waited for the last one to start; ``None``
            where no other rank's trace has it.
        last: likewise, the position of the rank that started last.
        unmatched: collectives without a partner.
        offsets_ns: what was added to each rank's clock; all 0 where the ranks share one.
    """

    waits_ns: tuple[tuple[int | None, ...], ...]
    last: tuple[tuple[int | None, ...], ...]
    unmatched: int
    offsets_ns: tuple[int, ...]

    @classmethod
    def unknown(cls, ranks: Sequence[Sequence[RankCollective]]) -> Waits:
        """Nothing was matched."""
        nothing = tuple((None,) * len(rank) for rank in ranks)
        return cls(nothing, nothing, sum(map(len, ranks)), (0,) * len(ranks))


_Key = tuple[object, ...]
_Group = list[tuple[int, int]]


def find_waits(ranks: Sequence[Sequence[RankCollective]]) -> Waits:
    """Match the collectives of all ranks and see how long each waited.

    A collective is known by process group, kind and sequence number; where the trace has no such number, by its
    place among those of the same group and kind in the same step, provided that all ranks have equally many.
    """
    groups = [group for group in _groups(ranks).values() if len(group) > 1]
    offsets_ns = _offsets_ns(ranks, groups)
    waits: list[list[int | None]] = [[None] * len(rank) for rank in ranks]
    last: list[list[int | None]] = [[None] * len(rank) for rank in ranks]
    for group in groups:
        starts_ns = {r: ranks[r][i].start_ns + offsets_ns[r] for r, i in group}
        latest = max(sorted(starts_ns), key=starts_ns.__getitem__)
        for r, i in group:
            length_ns = ranks[r][i].end_ns - ranks[r][i].start_ns
            waits[r][i] = min(length_ns, starts_ns[latest] - starts_ns[r])
            last[r][i] = latest
    return Waits(
        waits_ns=tuple(map(tuple, waits)),
        last=tuple(map(tuple, last)),
        unmatched=sum(wait is None for row in waits for wait in row),
        offsets_ns=offsets_ns,
    )


def _groups(ranks: Sequence[Sequence[RankCollective]]) -> dict[_Key, _Group]:
    """Key → (rank, position) of each that takes part."""
    numbered: dict[_Key, _Group] = defaultdict(list)
    ordered: dict[_Key, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for r, rank in enumerate(ranks):
        seen: Counter[_Key] = Counter()
        for i in sorted(range(len(rank)), key=lambda i: rank[i].start_ns):
            match = rank[i].match
            if match.sequence is None:
                ordered[rank[i].step, match.group, match.collective][r].append(i)
                continue
            # One launch may run as several kernels or copies, which share the number.
            name: _Key = (match.group, match.collective, match.sequence)
            numbered[*name, seen[name]].append((r, i))
            seen[name] += 1
    for key, by_rank in ordered.items():
        if len({len(positions) for positions in by_rank.values()}) == 1:
            for place, members in enumerate(zip(*by_rank.values(), strict=True)):
                numbered[*key, "in order", place] = list(zip(by_rank, members, strict=True))
    return numbered


def _offsets_ns(ranks: Sequence[Sequence[RankCollective]], groups: Sequence[_Group]) -> tuple[int, ...]:
    """What brings the ends of the collectives together, rank by rank against the first that it has one in common with."""
    from statistics import median  # slow to import, and of no use with one rank

    offsets: dict[int, int] = {}
    for r in range(len(ranks)):
        gaps: list[int] = []
        for group in groups:
            ends = {member: ranks[member][i].end_ns for member, i in group}
            reference = next((member for member in offsets if member in ends), None)
            if r in ends and reference is not None:
                gaps.append(ends[reference] + offsets[reference] - ends[r])
        offset_ns = int(median(gaps)) if gaps else 0
        offsets[r] = offset_ns if abs(offset_ns) > SAME_CLOCK_NS else 0
    return tuple(offsets[r] for r in range(len(ranks)))
