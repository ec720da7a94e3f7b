"""What the ranks of a group share on one host: memory that all can reach, and words that tell how far each is."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.errors import TransportError
from overlap_pass.transport import driver
from overlap_pass.transport.ring import ALIGNMENT, Ring

__all__ = ["Channel", "SharedBuffer", "channel", "release_channels", "shared_bytes"]

_WORD_BYTES = 4
_WORDS = 4096
"""Words of each rank: more tickets than can be under way at once."""


_alive: WeakSet[SharedBuffer] = WeakSet()


def shared_bytes(device: torch.device) -> int:
    """What this process shares with its peers on a device; the caching allocator's statistics do not count it."""
    return sum(buffer.tensor.nbytes for buffer in _alive if buffer.tensor.device == device)


class SharedBuffer:
    """Device memory of this rank that its peers can read and write.

    Attributes:
        tensor: this rank's memory, as bytes.
        addresses: where each rank's memory begins, as seen from this device.
    """

    def __init__(self, size_bytes: int, group_name: str, device: torch.device) -> None:
        """Allocate and exchange addresses: returns on no rank before all have called it."""
        try:
            self.tensor = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device).zero_()
            # The zeros must be there before a peer may write.
            torch.cuda.synchronize(device)
            self._handle = symmetric_memory.rendezvous(self.tensor, group_name)
        except RuntimeError as error:
            raise TransportError(
                f"transport='copy_engine' cannot share {size_bytes} bytes among the ranks of group {group_name!r}: {error}; "
                "run with transport='nccl'"
            ) from error
        self.addresses: list[int] = list(self._handle.buffer_ptrs)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        _alive.add(self)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as elements of ``dtype``."""
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = self.tensor.view(dtype)
        return found


class Channel:
    """One direction of traffic of a group: a stream of its own, staging memory used round and round, and words.

    Every rank makes the same calls in the same order, as for any collective; so tickets and places agree without talking.
    Each rank has a row of words for each thing that its peers tell it: *ready* (or arrived) counts tickets, one word a
    peer; *gone* tells which tenants of the staging memory have left, one word a ticket and peer.

    Attributes:
        peers: all other ranks, the next one first, so that no rank is everybody's first.
        under_way: by ticket, what still lies in the staging memory.
    """

    def __init__(self, group_name: str, device: torch.device) -> None:
        group: dist.ProcessGroup = _resolve_process_group(group_name)
        self.rank, self.ranks = group.rank(), group.size()
        self.group_name, self.device = group_name, device
        self.stream = torch.cuda.Stream(device)
        self.staging: SharedBuffer | None = None
        self.peers = tuple((self.rank + step) % self.ranks for step in range(1, self.ranks))
        self.under_way: dict[int, Any] = {}
        self._ring = Ring(0)
        self._ticket = 0
        self._ready = SharedBuffer(self.ranks * _WORD_BYTES, group_name, device)
        self._gone = SharedBuffer(_WORDS * self.ranks * _WORD_BYTES, group_name, device)

    def next_ticket(self) -> int:
        self._ticket += 1
        return self._ticket

    def make_room(self, total_bytes: int) -> SharedBuffer:
        """Staging memory for at least two launches as large as the largest so far.

        It grows in the first steps only. Then the host waits for the device and for the other ranks: nobody reads or
        writes the old memory any more, but for what is held by tickets that are still to be finished.
        """
        if self.staging is None or 2 * total_bytes > self._ring.capacity_bytes:
            torch.cuda.synchronize(self.device)
            capacity_bytes = 2 * (-(-total_bytes // ALIGNMENT) * ALIGNMENT)
            self.staging = SharedBuffer(capacity_bytes, self.group_name, self.device)
            self._ring = Ring(capacity_bytes)
        return self.staging

    def reserve(self, size_bytes: int, ticket: int) -> tuple[int, tuple[int, ...]]:
        """Offset in the staging memory of every rank, and the tickets that must have left it."""
        place = self._ring.reserve(size_bytes, ticket)
        return place.offset, place.after

    def tell_ready(self, ticket: int) -> None:
        """Tell all peers, in the order of this channel's stream, that ``ticket`` and all before are ready."""
        for peer in self.peers:
            driver.write_word(self.stream, self._ready.addresses[peer] + self.rank * _WORD_BYTES, ticket)

    def await_ready(self, stream: torch.cuda.Stream, peer: int, ticket: int) -> None:
        """Hold a stream until ``peer`` has told that ``ticket`` is ready."""
        driver.wait_word(stream, self._ready.addresses[self.rank] + peer * _WORD_BYTES, ticket)

    def tell_gone(self, stream: torch.cuda.Stream, ticket: int) -> None:
        """Tell all peers, in the order of ``stream``, that this rank needs the place of ``ticket`` no more."""
        for peer in self.peers:
            driver.write_word(stream, self._gone.addresses[peer] + self._word(ticket, self.rank), ticket)

    def await_gone(self, stream: torch.cuda.Stream, peer: int, tickets: tuple[int, ...]) -> None:
        """Hold a stream until ``peer`` needs the places of ``tickets`` no more."""
        for ticket in tickets:
            driver.wait_word(stream, self._gone.addresses[self.rank] + self._word(ticket, peer), ticket)

    def _word(self, ticket: int, rank: int) -> int:
        return (ticket % _WORDS * self.ranks + rank) * _WORD_BYTES


@cache
def channel(group_name: str, direction: str, device: torch.device) -> Channel:
    """The channel of a group for ``"gather"`` or ``"reduce"``; made at the first call, which every rank makes alike."""
    return Channel(group_name, device)


def release_channels(device: torch.device) -> None:
    """Give shared memory back, on all ranks together; the next launch makes what it needs anew.

    Nothing may be under way. It waits for this device and for all ranks: a peer may still be reading from here.
    """
    torch.cuda.synchronize(device)
    dist.barrier()
    channel.cache_clear()
