"""Gathers and reductions by copy engines: no multiprocessor, no bucket, no rounding that was not asked for.

::

    gather     shard ─ cast ─┬─▶ own part of the result
                             └─▶ staging ── ready ──▶ peers copy it into their results ── gone ──▶ staging is free
    reduction  gradient rows of peer p ── copied into p's staging ── arrived ──▶ p sums in float32 ── gone ──▶ free

A reduction sends gradients as they are (bfloat16 where the model computes in it) and widens them at the sum. The values
added are those that a float32 reduce-scatter adds, for half the bytes; they are added in the order of the ranks. On two
ranks the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from overlap_pass.transport import driver
from overlap_pass.transport.peers import Channel, SharedBuffer, channel
from overlap_pass.transport.ring import ALIGNMENT
from overlap_pass.transport.total import Total

__all__ = ["finish_exchange", "start_exchange", "start_gather"]

# A training step calls these hundreds of times and the device waits for the host that does: no tensor is sliced where an
# offset will do, and what depends on shapes alone is worked out once.


class _Arrival(dist.Work):
    """What ``wait_tensor`` waits for: an event on the channel's stream, once for all results of a launch."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event
        self._waited: torch.cuda.Stream | None = None

    def wait(self, timeout: object = None) -> bool:
        here = torch.cuda.current_stream()
        if here != self._waited:
            here.wait_event(self._event)
            self._waited = here
        return True


@dataclass(slots=True)
class _Launch:
    """Gradients that were sent together and share a place in the staging memory.

    Attributes:
        ticket: of the place, which is free when all of them are summed.
        sent: this rank's copies are done.
        left: those that are not summed yet.
        awaited: the stream that has waited for the peers' pieces.
    """

    ticket: int
    staging: SharedBuffer
    sent: torch.cuda.Event
    left: dict[int, _Landing] = field(default_factory=dict)
    awaited: torch.cuda.Stream | None = None


@dataclass(slots=True)
class _Landing:
    """A gradient under way.

    Attributes:
        gradient: what was sent, whose own rows are added to what arrives.
        offset: where the peers' pieces land in the staging memory, in bytes.
        result: the sum, where its place was needed before it was asked for.
    """

    launch: _Launch
    gradient: Tensor
    total: Total
    offset: int
    result: Tensor | None = None


_landings: dict[int, _Landing] = {}
"""By the address of the token that stands for it in the graph, which lives until it is finished."""


def start_gather(shards: Sequence[Tensor], dtype: torch.dtype, group_name: str) -> list[Tensor]:
    """The gathered parameters, each to be waited for with ``wait_tensor``; shards are read in the order of the stream.

    Args:
        shards: this rank's rows of each, contiguous, as many on each rank.
        dtype: what travels.
    """
    from overlap_pass.transport.kernels import cast_to_both

    line = channel(group_name, "gather", shards[0].device)
    here = torch.cuda.current_stream()
    sizes = tuple(shard.numel() * dtype.itemsize for shard in shards)
    starts, total_bytes = _laid_out(sizes)
    staging = line.make_room(total_bytes)
    ticket = line.next_ticket()
    offset, after = line.reserve(total_bytes, ticket)
    for peer in line.peers:
        line.await_gone(here, peer, after)
    staged = staging.typed(dtype)
    results = []
    for shard, start in zip(shards, starts, strict=True):
        rows, *others = shard.shape
        result = torch.empty((rows * line.ranks, *others), dtype=dtype, device=shard.device)
        cast_to_both(shard, (staged, (offset + start) // dtype.itemsize), (result, line.rank * shard.numel()))
        results.append(result)
    line.stream.wait_event(here.record_event())
    line.tell_ready(ticket)
    for peer in line.peers:
        line.await_ready(line.stream, peer, ticket)
        source = staging.addresses[peer] + offset
        for result, start, size in zip(results, starts, sizes, strict=True):
            driver.copy(line.stream, result.data_ptr() + peer * size, source + start, size)
    line.tell_gone(line.stream, ticket)
    arrival = _Arrival(line.stream.record_event())
    for result in results:
        _register_work(result, arrival)
    return results


def start_exchange(gradients: Sequence[Tensor], total: Total, group_name: str) -> list[Tensor]:
    """Send each peer its rows of each gradient; a token for each gradient, to be finished with the same gradient.

    Where the place in the staging memory is still taken by gradients that nobody has asked for, those are summed now: a
    place that became free only behind this launch in the order of ops could keep all ranks waiting for ever.

    Args:
        gradients: contiguous, the rows of all ranks one after the other, as many for each.
    """
    line = channel(group_name, "reduce", gradients[0].device)
    line.stream.wait_event(torch.cuda.current_stream().record_event())
    pieces = tuple(gradient.nbytes // line.ranks for gradient in gradients)
    starts, total_bytes = _laid_out(tuple(piece * (line.ranks - 1) for piece in pieces))
    staging = line.make_room(total_bytes)
    ticket = line.next_ticket()
    offset, after = line.reserve(total_bytes, ticket)
    _sum_early(line, staging, after)
    for peer in line.peers:
        line.await_gone(line.stream, peer, after)
        slot = line.rank if line.rank < peer else line.rank - 1
        for gradient, start, piece in zip(gradients, starts, pieces, strict=True):
            target = staging.addresses[peer] + offset + start + slot * piece
            driver.copy(line.stream, target, gradient.data_ptr() + peer * piece, piece)
    line.tell_ready(ticket)
    launch = _Launch(ticket, staging, line.stream.record_event())
    tokens = []
    for gradient, start in zip(gradients, starts, strict=True):
        token = gradient.new_empty(1)
        address = token.data_ptr()
        launch.left[address] = _landings[address] = _Landing(launch, gradient, total, offset + start)
        tokens.append(token)
    line.under_way[ticket] = launch
    return tokens


def finish_exchange(token: Tensor, gradient: Tensor, total: Total, group_name: str) -> Tensor:
    """This rank's rows of the total of the ranks' gradients, once all have arrived."""
    address = token.data_ptr()
    landing = _landings.pop(address)
    if landing.result is not None:
        return landing.result
    return _sum(channel(group_name, "reduce", gradient.device), address, landing)


def _sum_early(line: Channel, staging: SharedBuffer, tickets: Sequence[int]) -> None:
    """Sum what still lies in the places of ``tickets``."""
    for ticket in tickets:
        launch = line.under_way.get(ticket)
        if launch is not None and launch.staging is staging:
            for address, landing in list(launch.left.items()):
                landing.result = _sum(line, address, landing)


def _sum(line: Channel, address: int, landing: _Landing) -> Tensor:
    """Add on the current stream, behind the arrival of all pieces; the last sum of a launch frees its place."""
    from overlap_pass.transport.kernels import sum_pieces

    here, launch, gradient = torch.cuda.current_stream(), landing.launch, landing.gradient
    if here != launch.awaited:
        for peer in line.peers:
            line.await_ready(here, peer, launch.ticket)
        here.wait_event(launch.sent)  # the gradients' memory may be used again behind this
        launch.awaited = here
    rows, *others = gradient.shape
    rows //= line.ranks
    out = torch.empty((rows, *others), dtype=landing.total.dtype, device=gradient.device)
    landed = (launch.staging.typed(gradient.dtype), landing.offset // gradient.itemsize)
    sum_pieces(gradient, landed, out, landing.total.factor(line.ranks), (line.rank, line.ranks))
    del launch.left[address]
    if not launch.left:
        del line.under_way[launch.ticket]
        if launch.staging is line.staging:  # nobody asks for places in memory that has been outgrown
            line.tell_gone(here, launch.ticket)
    return out


@cache
def _laid_out(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Where each of several pieces starts, and how many bytes they take together."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(starts), end
