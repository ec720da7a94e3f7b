"""The protocol of copy engines, on imagined devices: streams are queues that run in any order that CUDA allows.

Every stream of every rank is a queue of actions. A scheduler takes the head of any queue that may run (its word has been
written, its event recorded) at random. So one run stands for one interleaving of two or three devices: staging memory
that is written too early gives a wrong sum, and a circle of waits leaves queues that nobody can empty.
"""

from __future__ import annotations

import ctypes
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap_pass.transport import copy_engine, driver
from overlap_pass.transport.peers import Channel
from overlap_pass.transport.ring import Ring
from overlap_pass.transport.total import Total

LIMIT_ROWS = 6
WIDTH = 40


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


@dataclass
class Memory:
    tensor: Tensor
    addresses: list[int]

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

    def __init__(self, ranks: int, staging_bytes: int) -> None:
        self.devices = [Device(rank, Stream(), {}) for rank in range(ranks)]
        for direction in ("gather", "reduce"):
            ready, gone, staging = (self._shared(size) for size in (4 * ranks, 4096 * 4 * ranks, staging_bytes))
            for device in self.devices:
                channel = Channel.__new__(Channel)
                channel.rank, channel.ranks = device.rank, ranks
                channel.stream = Stream()  # type: ignore[assignment]
                channel.staging = staging[device.rank]  # type: ignore[assignment]
                channel.peers = tuple((device.rank + step) % ranks for step in range(1, ranks))
                channel.under_way = {}
                channel._ring, channel._ticket = Ring(staging_bytes), 0
                channel._ready, channel._gone = ready[device.rank], gone[device.rank]  # type: ignore[assignment]
                device.channels[direction] = channel
        self.here = self.devices[0]

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


def write_word(stream: Stream, address: int, value: int) -> None:
    stream.add(lambda: setattr(word(address), "value", value))


def wait_word(stream: Stream, address: int, value: int) -> None:
    stream.add(lambda: None, lambda: word(address).value >= value)


def copy(stream: Stream, destination: int, source: int, size_bytes: int) -> None:
    stream.add(lambda: ctypes.memmove(destination, source, size_bytes) and None)


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[World], None]]:
    """Puts imagined devices in the place of CUDA's."""
    world: list[World] = [World(1, 0)]

    def cast_to_both(source: Tensor, *places: tuple[Tensor, int]) -> None:
        def run() -> None:
            for tensor, offset in places:
                tensor.view(-1)[offset : offset + source.numel()] = source.view(-1)

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
    for name, fake in (("write_word", write_word), ("wait_word", wait_word), ("copy", copy)):
        monkeypatch.setattr(driver, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: world[0].here.compute)
    monkeypatch.setattr(copy_engine, "channel", lambda group, direction, device: world[0].here.channels[direction])
    monkeypatch.setattr(Channel, "make_room", lambda self, total_bytes: self.staging)
    monkeypatch.setattr(copy_engine, "_register_work", lambda result, work: setattr(result, "arrival", work))

    def entered(new: World) -> None:
        world[0] = new
        copy_engine._landings.clear()

    yield entered
    copy_engine._landings.clear()


@dataclass(frozen=True)
class Step:
    """One op of the program that all ranks run: a launch, or the end of the launch with that number."""

    kind: str
    number: int
    rows: tuple[int, ...] = ()


def program(seed: int, launches: int) -> list[Step]:
    """Launches of one to three tensors in a random order, each finished somewhere behind."""
    choose = random.Random(seed)
    steps: list[Step] = []
    for number in range(launches):
        rows = tuple(choose.randint(1, LIMIT_ROWS) for _ in range(choose.randint(1, 3)))
        steps.append(Step(choose.choice(("gather", "exchange")), number, rows))
    for step in list(steps):
        behind = steps.index(step) + 1
        steps.insert(choose.randint(behind, len(steps)), Step(f"finish {step.kind}", step.number))
    return steps


def data(rank: int, step: Step, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step.number + rank)
    factor = ranks if step.kind == "exchange" else 1
    return [torch.randn(rows * factor, WIDTH, generator=generator).bfloat16() for rows in step.rows]


def issue(world: World, steps: Sequence[Step]) -> dict[tuple[int, int], list[Tensor]]:
    """What each rank's host does; (rank, launch) → the tensors that will hold the results."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    total = Total(mean=True, dtype=torch.float32)
    for device in world.devices:
        world.here, rank, compute = device, device.rank, device.compute
        given: dict[int, list[Tensor]] = {}
        started: dict[int, list[Tensor]] = {}
        for step in steps:
            if step.kind == "gather":
                started[step.number] = copy_engine.start_gather(
                    [t.float() for t in data(rank, step, len(world.devices))], torch.bfloat16, "group"
                )
            elif step.kind == "exchange":
                given[step.number] = data(rank, step, len(world.devices))
                started[step.number] = copy_engine.start_exchange(given[step.number], total, "group")
            elif step.kind == "finish gather":
                for result in started[step.number]:
                    result.arrival.wait()  # type: ignore[attr-defined]
                kept = [torch.empty_like(result) for result in started[step.number]]
                found[rank, step.number] = kept
                compute.add(partial(_copy_all, list(zip(kept, started[step.number], strict=True))))
            else:
                tokens = started[step.number]
                found[rank, step.number] = [
                    copy_engine.finish_exchange(token, gradient, total, "group")
                    for token, gradient in zip(tokens, given[step.number], strict=True)
                ]
                # From here on a caching allocator may give the gradient's memory to somebody else.
                compute.add(partial(_spoil, given[step.number]))
    return found


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for kept, result in pairs:
        kept.copy_(result)


def _spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan"))


def wrong(world: World, steps: Sequence[Step], found: dict[tuple[int, int], list[Tensor]]) -> list[str]:
    """Results that are not what the ranks' data say."""
    ranks = len(world.devices)
    complaints = []
    for step in steps:
        if step.kind not in ("gather", "exchange"):
            continue
        sent = [data(rank, step, ranks) for rank in range(ranks)]
        for rank in range(ranks):
            for i, result in enumerate(found[rank, step.number]):
                if step.kind == "gather":
                    expected = torch.cat([tensors[i] for tensors in sent])
                else:
                    rows = step.rows[i]
                    mine = [tensors[i][rank * rows : (rank + 1) * rows].float() for tensors in sent]
                    expected = sum(mine[1:], mine[0]) * (1.0 / ranks)
                if not torch.equal(result, expected):
                    complaints.append(f"{step.kind} {step.number}.{i} on rank {rank}")
    return complaints


def trial(enter: Callable[[World], None], ranks: int, seed: int, launches: int = 12) -> tuple[bool, list[str]]:
    """Whether one interleaving of one program came to its end, and which results were wrong."""
    steps = program(seed, launches)
    largest = 3 * LIMIT_ROWS * WIDTH * 2 * max(1, ranks - 1) + 3 * 256
    world = World(ranks, 2 * largest)
    enter(world)
    found = issue(world, steps)
    ended = world.run(seed)
    return ended, wrong(world, steps, found) if ended else []


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_every_interleaving_ends_with_the_right_numbers(enter: Any, ranks: int, seed: int) -> None:
    assert trial(enter, ranks, seed) == (True, [])


def failures(enter: Callable[[World], None]) -> int:
    return sum(trial(enter, 2, seed) != (True, []) for seed in range(25))


@pytest.mark.parametrize("missing", ["await_gone", "await_ready", "tell_gone", "tell_ready"])
def test_no_word_is_said_or_heard_for_nothing(enter: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, missing, lambda self, *args: None)
    assert failures(enter) > 0


def test_a_gradient_that_nobody_asks_for_would_block_the_ranks_if_it_kept_its_place(
    enter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "_sum_early", lambda line, staging, tickets: None)
    assert failures(enter) > 0
