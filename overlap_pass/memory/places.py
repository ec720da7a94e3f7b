"""Where launches of a channel put what the ranks share: decided when a graph is compiled, the same at every run of it.

Staging memory is used round and round, and so are a few words. A launch that takes bytes or a word that an earlier one used
must wait until that one has left, and nothing else needs to be known when the graph runs: no ticket, no counter. So a
recorded CUDA graph repeats exactly what a run from Python does, and both may meet on different ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

__all__ = ["ALIGNMENT", "WORDS", "Landlord", "Place", "Tenancy", "Tenants", "aligned", "bits", "laid_out", "tenancies"]

ALIGNMENT = 256
"""Places start at multiples of this many bytes: what a vectorised kernel and a copy engine like."""

WORDS = 16
"""Most launches of a channel that are under way at once."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a launch takes; an operator's argument holds it as :attr:`numbers`.

    Attributes:
        capacity_bytes: of the staging memory that the place is in; which memory that is, all launches know by this size.
        offset: first byte.
        word: index of the words that tell how far the ranks are with this launch.
        awaited: indices of the words whose launches must have left before this one puts anything there, oldest first.
        final: bit by bit, which tensors of a gather lie there themselves, with the rows of all ranks.
    """

    capacity_bytes: int
    offset: int
    word: int
    awaited: tuple[int, ...] = ()
    final: int = 0

    @property
    def numbers(self) -> list[int]:
        return [self.capacity_bytes, self.offset, self.word, self.final, *self.awaited]

    def is_final(self, number: int) -> bool:
        """Whether a tensor, counted from 0, lies there itself."""
        return bool(self.final >> number & 1)

    def shifted(self, by_bytes: int) -> Place:
        """The part of the place that begins ``by_bytes`` behind its start, for whoever has no need to wait again."""
        return Place(self.capacity_bytes, self.offset + by_bytes, self.word)

    @staticmethod
    @cache
    def of(*numbers: int) -> Place:
        """The inverse of :attr:`numbers`."""
        capacity_bytes, offset, word, final, *awaited = numbers
        return Place(capacity_bytes, offset, word, tuple(awaited), final)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """A launch in its place.

    Attributes:
        after: positions of the earlier launches of the graph that must have left, oldest first.
    """

    place: Place
    after: tuple[int, ...]


class Landlord:
    """Gives places to the launches of one channel in one graph, in the order in which they are launched."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._head = self._given = 0
        self._tenants: deque[tuple[int, int, int]] = deque()

    def give(self, size_bytes: int) -> tuple[int, list[int]]:
        """First byte of the next place, of ``size_bytes`` and at most the capacity, and what must have left before."""
        index = self._given
        start = self._head if self._head + size_bytes <= self.capacity_bytes else 0
        self._head = end = start + aligned(size_bytes)
        tenants = self._tenants
        after = [last for first, past, last in tenants if (first < end and start < past) or last <= index - WORDS]
        if after:
            tenants = deque(tenant for tenant in tenants if tenant[2] not in after)
        tenants.append((start, end, index))
        self._tenants, self._given = tenants, index + 1
        return start, after


class Tenants:
    """Who lies where in memory whose places are settled, while the gathers of one channel come in their order."""

    def __init__(self) -> None:
        self._there: list[tuple[int, int, int, bool]] = []
        self._count, self._over = 0, -1

    def take(self, start: int, end: int, final: bool) -> tuple[list[int], int | None]:
        """The next launch comes: who lay in its bytes, oldest first, and who must be over before (they are so in their order).

        Args:
            final: its results lie there themselves, so that all has been read when the next one comes. Who has read them has
                waited for the launch, and it was over then.
        """
        gone = [tenant for tenant in self._there if tenant[0] < end and start < tenant[1]]
        self._there = [tenant for tenant in self._there if tenant not in gone]
        self._there.append((start, end, self._count, final))
        self._over = max(self._over, *(number for *_, number, was_read in gone if was_read), -1)
        awaited = max(self._count - WORDS, *(number for *_, number, was_read in gone if not was_read), -1)
        needed = awaited if awaited > self._over else None
        self._over = max(self._over, awaited)
        self._count += 1
        return [number for *_, number, _ in gone], needed


def tenancies(sizes_bytes: Sequence[int], at_once: int = 2, *, leaves_nothing: bool = False) -> tuple[Tenancy, ...]:
    """Places for the launches of one channel in one graph, in the order in which they are launched.

    Args:
        at_once: staging memory holds the largest launch so many times.
        leaves_nothing: when a graph is done, all of its launches have left.

    Otherwise the first launch waits for all words, whatever ran before: then nothing of an earlier graph is left.

    >>> [tenancy.place.offset for tenancy in tenancies([512, 512, 512])]
    [0, 512, 0]
    >>> [tenancy.after for tenancy in tenancies([512, 512, 512])]
    [(), (), (0,)]
    """
    landlord = Landlord(at_once * aligned(max(sizes_bytes, default=0)))
    found = []
    for index, size_bytes in enumerate(sizes_bytes):
        start, after = landlord.give(size_bytes)
        awaited = tuple(tenant % WORDS for tenant in after)
        if index == 0 and not leaves_nothing:
            awaited = tuple(range(WORDS))
        found.append(Tenancy(Place(landlord.capacity_bytes, start, index % WORDS, awaited), tuple(after)))
    return tuple(found)


def bits(final: Iterable[bool]) -> int:
    """Which tensors of a gather lie in their place themselves, bit by bit.

    >>> bits([True, False, True])
    5
    """
    return sum(1 << number for number, one in enumerate(final) if one)


@cache
def laid_out(sizes_bytes: tuple[int, ...], final: int = 0, ranks: int = 1) -> tuple[tuple[int, ...], int]:
    """Where each of several pieces starts in the place of their launch, and how many bytes they take together.

    Args:
        final: bit by bit, which pieces lie there from all of ``ranks``: those come first, the others one after the other.
    """
    starts, end = [0] * len(sizes_bytes), 0
    for with_all in (1, 0):
        for number, size_bytes in enumerate(sizes_bytes):
            if final >> number & 1 == with_all:
                starts[number] = end
                end += aligned(size_bytes * ranks if with_all else size_bytes)
    return tuple(starts), end


def aligned(size_bytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
