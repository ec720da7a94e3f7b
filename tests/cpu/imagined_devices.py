"""Imagined devices: streams are queues of actions that run in any order which CUDA allows, memory is the CPU's.

A scheduler takes the head of any queue that may run (its word has been written, its event recorded) at random. So one run stands
for one interleaving of several devices.
"""

from __future__ import annotations

import ctypes
import operator
import random
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_pass.memory import leases
from overlap_pass.memory.places import WORDS, aligned
from overlap_pass.rewrite import places as rewrite_places
from overlap_pass.transport import copy_engine, driver, peers
from overlap_pass.transport.driver import Words
from overlap_pass.transport.final import Final
from overlap_pass.transport.peers import Channel

__all__ = ["Device", "Event", "Memory", "Stream", "World", "entered"]


@dataclass
class Event:
    done: bool = False

    def set(self) -> None:
        self.done = True


@dataclass(eq=False)
class Stream:
    queue: list[tuple[Callable[[], bool], Callable[[], None]]] = field(default_factory=list)

    def add(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((ready, run))

    def record_event(self) -> Event:
        event = Event()
        self.add(event.set)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(lambda: None, lambda: event.done)

    def __ne__(self, other: object) -> bool:
        return other is not None and self is not other  # as torch's streams have it


@dataclass
class Memory:
    tensor: Tensor
    addresses: list[int]
    final: Final = field(init=False)

    def __post_init__(self) -> None:
        self.final = Final(self.tensor)

    def typed(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.view(dtype)


@dataclass
class Device:
    """One rank: its streams and its channels."""

    rank: int
    compute: Stream
    channels: dict[str, Channel]


class World:
    """All ranks; ``here`` is the one whose host is running."""

    def __init__(self, ranks: int) -> None:
        self.devices = [Device(rank, Stream(), {}) for rank in range(ranks)]
        self._memories: dict[tuple[Any, ...], list[Memory]] = {}
        for direction in ("gather", "reduce"):
            for device in self.devices:
                channel = Channel.__new__(Channel)
                channel.rank, channel.ranks = device.rank, ranks
                channel.stream = Stream()  # type: ignore[assignment]
                channel.peers = tuple((device.rank + step) % ranks for step in range(1, ranks))
                channel.under_way, channel.left, channel.summed, channel._said = {}, {}, [], {}
                channel._words = self.memory(direction, 2 * WORDS * 4 * ranks, device.rank)  # type: ignore[assignment]
                channel._staging, channel.recorded = {}, False
                channel.group_name, channel.device = direction, device.rank  # type: ignore[assignment]
                device.channels[direction] = channel
        self.here = self.devices[0]

    def memory(self, name: Any, size_bytes: int, rank: int) -> Memory:
        if (name, size_bytes) not in self._memories:
            self._memories[name, size_bytes] = self._shared(size_bytes)
        return self._memories[name, size_bytes][rank]

    def _shared(self, size_bytes: int) -> list[Memory]:
        tensors = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in self.devices]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return [Memory(tensor, addresses) for tensor in tensors]

    def run(self, seed: int) -> bool:
        """Run everything in one random interleaving; false if some streams can never go on."""
        choose = random.Random(seed)
        streams = [d.compute for d in self.devices] + [c.stream for d in self.devices for c in d.channels.values()]
        while busy := [stream for stream in streams if stream.queue]:
            ready = [stream for stream in busy if stream.queue[0][0]()]
            if not ready:
                return False
            choose.choice(ready).queue.pop(0)[1]()
        return True


def word(address: int) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(address)


def submit(stream: Stream, words: Words) -> None:
    for address, value in words.waits:
        stream.add(lambda: None, lambda address=address, value=value: word(address).value == value)  # type: ignore[misc]
    for address, value in words.writes:
        stream.add(partial(setattr, word(address), "value", value))


def copy(stream: Stream, destination: int, source: int, size_bytes: int) -> None:
    stream.add(lambda: ctypes.memmove(destination, source, size_bytes) and None)


def entered(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Puts imagined devices in the place of CUDA's; what it returns says which."""
    world: list[World] = [World(1)]

    def cast_to_both(
        shards: list[Tensor], results: list[Tensor], rank: int, staging: tuple[Tensor, int], final: int
    ) -> None:
        def run() -> None:
            memory, at = staging
            for number, (shard, result) in enumerate(zip(shards, results, strict=True)):
                result.view(-1)[rank * shard.numel() : (rank + 1) * shard.numel()] = shard.view(-1)
                if not final >> number & 1:
                    memory[at : at + shard.numel()] = shard.view(-1)
                    at += aligned(shard.numel() * memory.itemsize) // memory.itemsize

        world[0].here.compute.add(run)

    def sum_pieces(sent: Tensor, landed: tuple[Tensor, int], out: Tensor, scale: float, rank: tuple[int, int]) -> None:
        def run() -> None:
            (memory, offset), (own, ranks), count = landed, rank, out.numel()
            pieces = list(memory[offset : offset + (ranks - 1) * count].view(ranks - 1, count))
            pieces.insert(own, sent.reshape(ranks, count)[own])
            out.copy_((sum(piece.float() for piece in pieces) * scale).view_as(out))

        world[0].here.compute.add(run)

    kernels = types.ModuleType("overlap_pass.transport.kernels")
    kernels.cast_to_both, kernels.sum_pieces = cast_to_both, sum_pieces  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "overlap_pass.transport.kernels", kernels)
    # No more room than is needed, so that launches get close.
    monkeypatch.setattr(rewrite_places, "at_once", lambda kind: 2)
    monkeypatch.setattr(leases, "GATHERS_AT_ONCE", 2)
    monkeypatch.setattr(leases, "_LEAST_BYTES", 1)
    monkeypatch.setattr(
        peers, "SharedBuffer", lambda size, direction, rank: world[0].memory((direction, "staging"), size, rank)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(driver, "copy", copy)
    monkeypatch.setattr(peers, "submit", submit)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: world[0].here.compute)
    monkeypatch.setattr(copy_engine, "channel", lambda group, direction, device: world[0].here.channels[direction])
    monkeypatch.setattr(copy_engine, "_register_work", lambda result, work: setattr(result, "arrival", work))

    return partial(operator.setitem, world, 0)
