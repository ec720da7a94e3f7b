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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from overlap_pass.transport import driver
from overlap_pass.transport.peers import Channel, SharedBuffer, channel
from overlap_pass.transport.ring import ALIGNMENT
from overlap_pass.transport.total import Total

__all__ = ["finish_exchange", "start_exchange", "start_gather"]


class _Arrival(dist.Work):
    """What ``wait_tensor`` waits for: an event on the channel's stream, once for all results of a launch."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event

    def wait(self, timeout: object = None) -> bool:
        torch.cuda.current_stream().wait_event(self._event)
        return True


@dataclass(slots=True)
class _Landing:
    """A gradient under way.

    Attributes:
        gradient: what was sent, whose own rows are added to what arrives.
        ticket: its place in the staging memory.
        launch: the ticket that tells that all of its launch have arrived.
        staging, offset: where the peers' pieces land.
        sent: this rank's copies are done.
        result: the sum, where its place was needed before it was asked for.
    """

    gradient: Tensor
    total: Total
    ticket: int
    launch: int
    staging: SharedBuffer
    offset: int
    sent: torch.cuda.Event
    result: Tensor | None = None


_landings: dict[int, _Landing] = {}
"""By the address of the token that stands for it in the graph, which lives until it is finished."""


def start_gather(shards: Sequence[Tensor], dtype: torch.dtype, group_name: str) -> list[Tensor]:
    """The gathered parameters, each to be waited for with ``wait_tensor``; shards are read before this returns to the
    stream's next kernel.

    Args:
        shards: this rank's rows of each, contiguous, as many on each rank.
        dtype: what travels.
    """
    from overlap_pass.transport.kernels import cast_to_both

    line = channel(group_name, "gather", shards[0].device)
    here = torch.cuda.current_stream()
    sizes = [shard.numel() * dtype.itemsize for shard in shards]
    starts, total_bytes = _laid_out(sizes)
    staging = line.make_room(total_bytes)
    ticket = line.next_ticket()
    offset, after = line.reserve(total_bytes, ticket)
    for peer in line.peers:
        line.await_gone(here, peer, after)
    results = [
        torch.empty((shard.shape[0] * line.ranks, *shard.shape[1:]), dtype=dtype, device=shard.device)
        for shard in shards
    ]
    own = [
        result.view(-1)[line.rank * shard.numel() : (line.rank + 1) * shard.numel()]
        for result, shard in zip(results, shards, strict=True)
    ]
    staged = [
        staging.tensor[offset + start : offset + start + size].view(dtype)
        for start, size in zip(starts, sizes, strict=True)
    ]
    cast_to_both(shards, staged, own)
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

    Where the places in the staging memory are still taken by gradients that nobody has asked for, those are summed now: a
    place that became free only behind this launch in the order of ops could keep all ranks waiting for ever.

    Args:
        gradients: contiguous, the rows of all ranks one after the other, as many for each.
    """
    line = channel(group_name, "reduce", gradients[0].device)
    line.stream.wait_event(torch.cuda.current_stream().record_event())
    pieces = [gradient.nbytes // line.ranks for gradient in gradients]
    _, total_bytes = _laid_out([piece * (line.ranks - 1) for piece in pieces])
    staging = line.make_room(total_bytes)
    tickets = [line.next_ticket() for _ in gradients]
    offsets = []
    for gradient, piece, ticket in zip(gradients, pieces, tickets, strict=True):
        offset, after = line.reserve(piece * (line.ranks - 1), ticket)
        offsets.append(offset)
        for landing in [landing for landing in _landings.values() if landing.staging is staging]:
            if landing.ticket in after and landing.result is None:
                landing.result = _sum(line, landing)
        for peer in line.peers:
            line.await_gone(line.stream, peer, after)
            slot = line.rank if line.rank < peer else line.rank - 1
            target = staging.addresses[peer] + offset + slot * piece
            driver.copy(line.stream, target, gradient.data_ptr() + peer * piece, piece)
    line.tell_ready(tickets[-1])
    sent = line.stream.record_event()
    tokens = [gradient.new_empty(1) for gradient in gradients]
    for token, gradient, ticket, offset in zip(tokens, gradients, tickets, offsets, strict=True):
        _landings[token.data_ptr()] = _Landing(gradient, total, ticket, tickets[-1], staging, offset, sent)
    return tokens


def finish_exchange(token: Tensor, gradient: Tensor, total: Total, group_name: str) -> Tensor:
    """This rank's rows of the total of the ranks' gradients, once all have arrived."""
    landing = _landings.pop(token.data_ptr())
    if landing.result is not None:
        return landing.result
    return _sum(channel(group_name, "reduce", gradient.device), landing)


def _sum(line: Channel, landing: _Landing) -> Tensor:
    """Add on the current stream, behind the arrival of all pieces, and free their place."""
    from overlap_pass.transport.kernels import sum_pieces

    here = torch.cuda.current_stream()
    for peer in line.peers:
        line.await_ready(here, peer, landing.launch)
    here.wait_event(landing.sent)  # the gradient's memory may be used again behind this
    gradient = landing.gradient
    rows = gradient.shape[0] // line.ranks
    out = torch.empty((rows, *gradient.shape[1:]), dtype=landing.total.dtype, device=gradient.device)
    size = (line.ranks - 1) * (gradient.nbytes // line.ranks)
    landed = landing.staging.tensor[landing.offset : landing.offset + size].view(gradient.dtype)
    own = gradient.narrow(0, line.rank * rows, rows)
    sum_pieces(own, landed, out, landing.total.factor(line.ranks), line.rank)
    if landing.staging is line.staging:  # nobody asks for places in memory that has been outgrown
        line.tell_gone(here, landing.ticket)
    return out


def _laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where each of several pieces starts, and how many bytes they take together."""
    aligned = [math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes]
    starts = [sum(aligned[:i]) for i in range(len(sizes))]
    return starts, sum(aligned)
