"""Places in a buffer that is used round and round, and who must have left before a place is taken again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Place", "Ring"]

ALIGNMENT = 256
"""Places start at multiples of this many bytes: what a vectorised kernel and a copy engine like."""


@dataclass(frozen=True, slots=True)
class Place:
    """Part of a ring.

    Attributes:
        offset: first byte.
        after: tickets of the earlier tenants of these bytes, oldest first: all must have left before it is written.
    """

    offset: int
    after: tuple[int, ...]


class Ring:
    """Hands out places of a buffer in order, from the start again at its end.

    It keeps no time: whether a tenant has left is for the caller to find out. Given the same requests, every rank gets
    the same places, which is what lets a rank know where its peers put things.

    >>> ring = Ring(1024)
    >>> [ring.reserve(512, ticket).offset for ticket in (1, 2, 3)]
    [0, 512, 0]
    >>> ring.reserve(512, 4).after
    (2,)
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._head = 0
        self._tenants: deque[tuple[int, int, int]] = deque()

    def reserve(self, size_bytes: int, ticket: int) -> Place:
        """A place of ``size_bytes`` for the tenant ``ticket``.

        Raises:
            ValueError: larger than the whole ring.
        """
        if size_bytes > self.capacity_bytes:
            raise ValueError(f"{size_bytes} bytes do not fit into a ring of {self.capacity_bytes} bytes")
        start = self._head if self._head + size_bytes <= self.capacity_bytes else 0
        end = start + size_bytes
        after = tuple(t for first, last, t in self._tenants if first < end and start < last)
        gone = set(after)
        self._tenants = deque(tenant for tenant in self._tenants if tenant[2] not in gone)
        self._tenants.append((start, end, ticket))
        self._head = -(-end // ALIGNMENT) * ALIGNMENT
        return Place(start, after)
