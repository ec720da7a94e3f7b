"""What the ranks of a group share on one host: memory that all can reach, and words that tell how far each is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.errors import TransportError
from overlap_pass.memory.places import WORDS
from overlap_pass.transport.driver import Words, submit
from overlap_pass.transport.final import Final

__all__ = ["Channel", "SharedBuffer", "channel", "release_channels", "shared_bytes"]

_WORD_BYTES = 4
_FREE, _TAKEN = 0, 1
_NOT_YET, _READY = 0, 1

_alive: WeakSet[SharedBuffer] = WeakSet()


def shared_bytes(device: torch.device) -> int:
    """What this process shares with its peers on a device; the caching allocator's statistics do not count it."""
    return sum(buffer.tensor.nbytes for buffer in _alive if buffer.tensor.device == device)


class SharedBuffer:
    """Device memory of this rank that its peers can read and write.

    Attributes:
        tensor: this rank's memory, as bytes.
        addresses: where each rank's memory begins, as seen from this device.
        final: gathered parameters in this rank's memory.
    """

    def __init__(self, size_bytes: int, group_name: str, device: torch.device) -> None:
        """Allocate and exchange addresses: returns on no rank before all have called it.

        Raises:
            TransportError: the memory cannot be shared, or a CUDA graph is being recorded, which cannot hold this.
        """
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"{size_bytes} bytes are to be shared among the ranks of group {group_name!r} while a CUDA graph is being "
                "recorded: run the compiled function once before you record it"
            )
        try:
            # The first call comes in a run whose allocations a CUDA graph will own. Those of another thread it does not.
            with ThreadPoolExecutor(1) as aside:
                self.tensor, self._handle = aside.submit(_share, size_bytes, group_name, device).result()
        except RuntimeError as error:
            raise TransportError(
                f"transport='copy_engine' cannot share {size_bytes} bytes among the ranks of group {group_name!r}: {error}; "
                "run with transport='nccl'"
            ) from error
        self.addresses: list[int] = list(self._handle.buffer_ptrs)
        self.final = Final(self.tensor)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        _alive.add(self)

    def typed(self, dtype: torch.dtype) -> torch.Tensor:
        """The memory as elements of ``dtype``."""
        found = self._typed.get(dtype)
        if found is None:
            found = self._typed[dtype] = self.tensor.view(dtype)
        return found


def _share(size_bytes: int, group_name: str, device: torch.device) -> tuple[torch.Tensor, Any]:
    with torch.cuda.device(device):
        tensor = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device).zero_()
        torch.cuda.synchronize(device)  # the zeros must be there before a peer may write
        return tensor, symmetric_memory.rendezvous(tensor, group_name)


class Channel:
    """One direction of traffic of a group: a stream of its own, staging memory, and words.

    Every rank makes the same calls in the same order, as for any collective. For each launch under way there is a word for
    every pair of ranks in the memory of either:

    - *taken*, at the rank that puts something into staging memory: its peer has not yet fetched or summed it;
    - *ready*, at the rank that fetches or sums it: it is there.

    All are zero before and after each graph: whoever has waited for a word puts it back.

    Attributes:
        peers: all other ranks, the next one first, so that no rank is everybody's first.
        under_way: by word, what has been sent and is not summed yet.
        summed: words of what has been summed, of which the peers have not been told yet.
        left: by word, when all ranks have fetched what was gathered with it last.
        recorded: a CUDA graph holds addresses of this channel.
    """

    def __init__(self, group_name: str, device: torch.device) -> None:
        self.group: dist.ProcessGroup = _resolve_process_group(group_name)
        self.rank, self.ranks = self.group.rank(), self.group.size()
        self.group_name, self.device = group_name, device
        self.stream = torch.cuda.Stream(device)
        self.peers = tuple((self.rank + step) % self.ranks for step in range(1, self.ranks))
        self.under_way: dict[int, Any] = {}
        self.summed: list[int] = []
        self.left: dict[int, torch.cuda.Event] = {}
        self.recorded = False
        self._staging: dict[int, SharedBuffer] = {}
        self._words = SharedBuffer(2 * WORDS * self.ranks * _WORD_BYTES, group_name, device)
        self._said: dict[tuple[Any, ...], Words] = {}

    def staging(self, capacity_bytes: int) -> SharedBuffer:
        """Staging memory of so many bytes or more; made, while the host waits for the other ranks, where there is none yet.

        Graphs share it: behind each, all that it put there has left. For a size it is the same memory at every call, as what
        is made later is larger than all that is there.
        """
        found = self._staging.get(capacity_bytes) or self._large_enough(capacity_bytes)
        self._staging[capacity_bytes] = found
        self.recorded = self.recorded or torch.cuda.is_current_stream_capturing()
        return found

    def _large_enough(self, capacity_bytes: int) -> SharedBuffer:
        sizes = [size for size in self._staging if size >= capacity_bytes]
        if sizes:
            return self._staging[min(sizes)]
        return SharedBuffer(capacity_bytes, self.group_name, self.device)

    def take(self, word: int, awaited: Sequence[int] = ()) -> None:
        """Mark a word as taken, once all peers have left those that are awaited; as all of these, in the stream's order."""
        said = self._said.get(key := ("take", word, *awaited))
        if said is None:
            waits = [(self._taken(self.rank, earlier, peer), _FREE) for earlier in awaited for peer in self.peers]
            writes = [(self._taken(self.rank, word, peer), _TAKEN) for peer in self.peers]
            said = self._said[key] = Words(waits=waits, writes=writes)
        submit(self.stream, said)

    def tell_ready(self, word: int) -> None:
        """Tell all peers that their parts are there."""
        said = self._said.get(key := ("ready", word))
        if said is None:
            writes = [(self._ready(peer, word, self.rank), _READY) for peer in self.peers]
            said = self._said[key] = Words(writes=writes)
        submit(self.stream, said)

    def await_ready(self, peer: int, word: int) -> None:
        """Hold the stream until ``peer`` has told that its part is there; to be called once a launch."""
        said = self._said.get(key := ("await", peer, word))
        if said is None:
            address = self._ready(self.rank, word, peer)
            said = self._said[key] = Words(waits=[(address, _READY)], writes=[(address, _NOT_YET)])
        submit(self.stream, said)

    def tell_gone(self, stream: torch.cuda.Stream, *words: int) -> None:
        """Tell all peers, in the order of ``stream``, that this rank needs their parts no more."""
        said = self._said.get(key := ("gone", *words))
        if said is None:
            writes = [(self._taken(peer, word, self.rank), _FREE) for word in words for peer in self.peers]
            said = self._said[key] = Words(writes=writes)
        submit(stream, said)

    def tell_summed(self, stream: torch.cuda.Stream) -> None:
        """Tell all peers, in the order of ``stream``, which of their pieces have been summed since they were told last."""
        if self.summed:
            self.tell_gone(stream, *self.summed)
            self.summed.clear()

    def await_gone(self, word: int) -> None:
        """Hold the stream until no peer needs this rank's parts any more."""
        said = self._said.get(key := ("left", word))
        if said is None:
            waits = [(self._taken(self.rank, word, peer), _FREE) for peer in self.peers]
            said = self._said[key] = Words(waits=waits)
        submit(self.stream, said)

    def _taken(self, at: int, word: int, peer: int) -> int:
        return self._words.addresses[at] + (word * self.ranks + peer) * _WORD_BYTES

    def _ready(self, at: int, word: int, peer: int) -> int:
        return self._taken(at, WORDS + word, peer)


_channels: dict[tuple[str, str, torch.device], Channel] = {}
_recorded: list[Channel] = []
"""Kept for the graphs that hold their addresses."""


def channel(group_name: str, direction: str, device: torch.device) -> Channel:
    """The channel of a group for ``"gather"`` or ``"reduce"``; made at the first call, which every rank makes alike.

    A group that is made after another of the same name was destroyed gets channels of its own.
    """
    key = (group_name, direction, device)
    made = _channels.get(key)
    if made is None or made.group is not _resolve_process_group(group_name):
        made = _channels[key] = Channel(group_name, device)
    return made


def release_channels(device: torch.device) -> None:
    """Give shared memory back, on all ranks together; the next launch makes what it needs anew.

    Nothing may be under way. It waits for this device and for all ranks: a peer may still be reading from here. What recorded
    CUDA graphs use stays.
    """
    torch.cuda.synchronize(device)
    dist.barrier()
    _recorded.extend(made for made in _channels.values() if made.recorded)
    _channels.clear()
