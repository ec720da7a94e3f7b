"""Gathers that are under way before the graph that needs them runs: across the edge between two steps.

::

    in the graph    asks ─▶ takes what is under way, if it was launched from these very shards as they are now; else launches
    at the edge     what the first graph of the last step asked for ─▶ shards that the optimizer is through with ─▶ launched

The operator ``gather_ahead`` does what the launch in whose place it stands did: cast, pad, gather. It also notes what it was
asked for, by the identity of the shards' memory, so that :class:`overlap_pass.fsdp.edge.StepEdge` knows what the next
step begins with. All of it goes over the communicator, also where other gathers go by copy engine: places in staging
memory belong to a run of a graph, and this is none.

Nothing stale is ever used. A shard's memory, its version and that of the DTensor around it are compared on the host; some
writes change no version (``.data``, ``torch._foreach_…`` and fused optimizers on DTensors), so what was sent is also compared
with the shard bit by bit, where the gather is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.errors import TransportError
from overlap_pass.transport import collectives
from overlap_pass.transport.ops import define

__all__ = [
    "GATHER_AHEAD",
    "Asked",
    "Gather",
    "UnderWay",
    "asked_by",
    "drop",
    "join_checks",
    "launch",
    "under_way_bytes",
]

_FUNCTIONAL = torch.ops._c10d_functional
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHANGED = (
    "a parameter that was gathered across the step's edge has been written since by a way that changes no version (.data, "
    "torch._foreach_… or a fused optimizer on DTensors): call drop() of the StepEdge behind such a write"
)


@dataclass(frozen=True, slots=True)
class Gather:
    """How some shards are gathered by one launch; the same on every rank.

    Attributes:
        dtype: what travels.
        rows: that each rank sends of each, padding included.
    """

    dtype: torch.dtype
    rows: tuple[int, ...]
    group_name: str

    def sent(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """What this rank sends, in memory of its own."""
        return [self._sent(shard, rows) for shard, rows in zip(shards, self.rows, strict=True)]

    def _sent(self, shard: Tensor, rows: int) -> Tensor:
        if rows == shard.shape[0]:
            return shard.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        padding = [0, 0] * (shard.dim() - 1) + [0, rows - shard.shape[0]]
        return torch.constant_pad_nd(shard.to(self.dtype), padding)

    def start(self, sent: Sequence[Tensor]) -> list[Tensor]:
        """The gathered tensors, each to be waited for with ``wait_tensor``."""
        if len(sent) > 1 and sent[0].is_cuda:
            ranks = _resolve_process_group(self.group_name).size()
            return list(_FUNCTIONAL.all_gather_into_tensor_coalesced(list(sent), ranks, self.group_name))
        return collectives.start_gather(sent, self.dtype, self.group_name)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a graph asked for: the memory of its shards, and how they are gathered. Holds no tensor."""

    storages: tuple[int, ...]
    gather: Gather


@dataclass(eq=False, slots=True)
class UnderWay:
    """A launch that no graph has taken yet.

    Attributes:
        owner: who launched it.
        parameters: the DTensors around the shards.
        sent: what this rank has sent of the shards.
        results: the gathered tensors, not waited for.
        stream: that it was launched on, ``None`` off CUDA.
    """

    owner: int
    gather: Gather
    parameters: Sequence[Tensor]
    shards: Sequence[Tensor]
    sent: Sequence[Tensor]
    results: Sequence[Tensor]
    stream: Any
    versions: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.versions = self._versions()

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in (*self.parameters, *self.shards))

    def serves(self, shards: Sequence[Tensor], gather: Gather) -> bool:
        """Whether it is a gather of the memory of these shards."""
        return gather == self.gather and all(map(_same_memory, shards, self.shards))

    def is_current(self) -> bool:
        """Whether nothing that changes a version was done to the parameters since."""
        return self.versions == self._versions() and bool(self.stream == _stream(self.shards[0]))

    def check(self) -> None:
        """See that what was sent is what the shards are now.

        On CUDA a stream of its own does, beside the begin of the graph, and a difference stops the device; before parameters are
        written to again, :func:`join_checks` waits for it.

        Raises:
            TransportError: off CUDA, where it is not.
        """
        if self.stream is None:
            if not self._is_unchanged():
                raise TransportError(_CHANGED)
            return
        aside = _checking(self.shards[0].device)
        aside.wait_stream(self.stream)
        with torch.cuda.stream(aside):
            torch._assert_async(self._is_unchanged(), _CHANGED)
        for sent in self.sent:
            sent.record_stream(aside)

    def _is_unchanged(self) -> Tensor:
        pairs = zip(self.sent, self.gather.sent(self.shards), strict=True)
        same = [(sent.view(_INTEGERS[sent.itemsize]) == now.view(_INTEGERS[now.itemsize])).all() for sent, now in pairs]
        return torch.stack(same).all()

    def finish(self) -> None:
        """Wait for it, on the stream whose memory it is in; then its memory may go."""
        with torch.cuda.stream(self.stream):
            for result in self.results:
                _FUNCTIONAL.wait_tensor(result)


@cache
def _checking(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def join_checks(device: torch.device) -> None:
    """Hold what is launched from here on until no check reads a shard any more."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_checking(device))


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.dtype == other.dtype
    )


def _stream(tensor: Tensor) -> Any:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


_asked: dict[tuple[int, ...], list[Asked]] = {}
"""By what the first launch of a graph asked for: all that the graph asked for when it ran last."""
_asking: list[Asked] = []
_under_way: list[UnderWay] = []


def asked_by(storages: Collection[int]) -> list[Asked]:
    """What the graph that ran first since the last call, of those over shards of ``storages`` alone, asked for."""
    own = [
        key for key, asked in _asked.items() if all(storage in storages for one in asked for storage in one.storages)
    ]
    found = [_asked.pop(key) for key in own]
    return found[0] if found else []


def launch(asked: Asked, parameters: Sequence[Tensor], shards: Sequence[Tensor], owner: int) -> None:
    """Launch what a graph will ask for.

    Args:
        parameters: the DTensors around the shards.
        owner: who may :func:`drop` it.
    """
    _refuse_recording(shards[0])
    sent = asked.gather.sent(shards)
    results = asked.gather.start(sent)
    way = UnderWay(owner, asked.gather, tuple(parameters), tuple(shards), sent, results, _stream(shards[0]))
    _under_way.append(way)


def drop(owner: int) -> None:
    """Wait for what ``owner`` has launched and no graph has taken, and let it go."""
    for way in [way for way in _under_way if way.owner == owner]:
        _under_way.remove(way)
        way.finish()


def under_way_bytes(owner: int) -> int:
    """What is held for the launches of ``owner`` that no graph has taken."""
    held = (tensor for way in _under_way if way.owner == owner for tensor in (*way.results, *way.sent))
    return sum(tensor.nbytes for tensor in held)


def _gather_ahead(
    shards: Sequence[Tensor], dtype: torch.dtype, rows: list[int], group_size: int, group_name: str, first: bool
) -> list[Tensor]:
    _refuse_recording(shards[0])
    gather = Gather(dtype, tuple(rows), group_name)
    _note(Asked(tuple(shard.untyped_storage()._cdata for shard in shards), gather), first)
    found = next((way for way in _under_way if way.serves(shards, gather)), None)
    if found is not None:
        if current := found.is_current():
            found.check()
        _under_way.remove(found)
        if current:
            return list(found.results)
        found.finish()
    return gather.start(gather.sent(shards))


def _note(asked: Asked, first: bool) -> None:
    global _asking
    if first:
        _asking = _asked[asked.storages] = []
    _asking.append(asked)


def _refuse_recording(shard: Tensor) -> None:
    if shard.is_cuda and torch.cuda.is_current_stream_capturing():
        raise TransportError(
            "a gather across the step's edge cannot be part of a CUDA graph: what it takes is there once and not at each "
            "replay; record without a StepEdge"
        )


def _shapes(
    shards: Sequence[Tensor], dtype: torch.dtype, rows: list[int], group_size: int, group_name: str, first: bool
) -> list[Tensor]:
    return [
        shard.new_empty((count * group_size, *shard.shape[1:]), dtype=dtype)
        for shard, count in zip(shards, rows, strict=True)
    ]


GATHER_AHEAD = define(
    "gather_ahead(Tensor[] shards, ScalarType dtype, int[] rows, int group_size, str group_name, bool first) -> Tensor[]",
    _gather_ahead,
    _shapes,
    torch.Tag.needs_contiguous_strides,
)
