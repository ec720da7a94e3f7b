"""Gathers and reductions by copy engines: no multiprocessor, no bucket, no rounding that was not asked for.

::

    gather     shard ─ cast ─┬─▶ own part of the result
                             └─▶ staging ── ready ──▶ peers copy it into their results ── gone ──▶ staging is free
               shard ─ cast ───▶ own part of the result, in shared memory ── ready ──▶ peers copy it … (``memory.leases``)
    reduction  gradient rows of peer p ── copied into p's staging ── arrived ──▶ p sums in float32 ── gone ──▶ free

Words are waited for on the channel's stream, and the compute stream waits for events of that: a word between two kernels
costs compute some 14 µs on H200, an event next to nothing.

A reduction sends gradients as they are (bfloat16 where the model computes in it) and widens them at the sum. The values
added are those that a float32 reduce-scatter adds, for half the bytes; they are added in the order of the ranks. On two
ranks the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work

from overlap_pass.errors import TransportError
from overlap_pass.memory.places import Place, laid_out
from overlap_pass.transport import driver
from overlap_pass.transport.peers import channel
from overlap_pass.transport.total import Total

__all__ = ["finish_exchange", "start_exchange", "start_gather"]

# A training step calls these hundreds of times and the device waits for the host that does: no tensor is sliced where an
# offset will do, and what depends on shapes and places alone is worked out once.


class _Arrival(dist.Work):
    """What ``wait_tensor`` waits for: an event on the channel's stream, once for all results of a launch."""

    def __init__(self, event: torch.cuda.Event) -> None:
        super().__init__()
        self._event = event
        self._waited: torch.cuda.Stream | None = None

    def wait(self, timeout: object = None) -> bool:
        here = torch.cuda.current_stream()
        if self._waited is None or here != self._waited:  # torch's streams say False to `!= None`
            here.wait_event(self._event)
            self._waited = here
        return True


@dataclass(slots=True)
class _Launch:
    """Gradients that were sent together.

    Attributes:
        arrived: this rank's pieces are sent, the peers' are here.
        left: how many are not summed yet.
        awaited: the compute stream has waited for that.
    """

    arrived: torch.cuda.Event
    left: int
    awaited: bool = False


def start_gather(shards: Sequence[Tensor], dtype: torch.dtype, group_name: str, place: Place) -> list[Tensor]:
    """The gathered parameters, each to be waited for with ``wait_tensor``; shards are read in the order of the stream.

    Args:
        shards: this rank's rows of each, contiguous, as many on each rank.
        dtype: what travels.
        place: in the staging memory, for what the peers fetch from here, and for results that lie there themselves. All
            that reads what lay there before has been launched.
    """
    from overlap_pass.transport.kernels import cast_to_both

    line = channel(group_name, "gather", shards[0].device)
    here = torch.cuda.current_stream()
    sizes = tuple(shard.numel() * dtype.itemsize for shard in shards)
    starts, end = laid_out(sizes, place.final, line.ranks)
    staging = line.staging(place.capacity_bytes)
    if place.awaited:
        here.wait_event(line.left[place.awaited[-1]])  # launches are over in their order
    results = []
    for number, (shard, start) in enumerate(zip(shards, starts, strict=True)):
        rows, *others = shard.shape
        if place.is_final(number):
            results.append(staging.final.at(place.offset + start, (rows * line.ranks, *others), dtype))
        else:
            results.append(torch.empty((rows * line.ranks, *others), dtype=dtype, device=shard.device))
            end = min(start, end)
    cast_to_both(
        shards, results, line.rank, (staging.typed(dtype), (place.offset + end) // dtype.itemsize), place.final
    )
    line.stream.wait_event(here.record_event())
    line.take(place.word)
    line.tell_ready(place.word)
    for peer in line.peers:
        line.await_ready(peer, place.word)
        source = staging.addresses[peer] + place.offset
        for number, (result, start, size) in enumerate(zip(results, starts, sizes, strict=True)):
            start += peer * size if place.is_final(number) else 0
            driver.copy(line.stream, result.data_ptr() + peer * size, source + start, size)
    line.tell_gone(line.stream, place.word)
    # Part of the launch, not of the next one there: all streams of a recorded graph have to end in its compute.
    line.await_gone(place.word)
    over = line.stream.record_event()
    line.left[place.word] = over
    arrival = _Arrival(over)
    for result in results:
        _register_work(result, arrival)
    return results


def start_exchange(gradients: Sequence[Tensor], total: Total, group_name: str, place: Place) -> list[Tensor]:
    """Send each peer its rows of each gradient; a token for each gradient, to be finished with the same gradient.

    Args:
        gradients: contiguous, the rows of all ranks one after the other, as many for each.
        place: in the staging memory of every rank, for what its peers send it.

    Raises:
        TransportError: gradients whose place this needs have not been summed: the ranks would wait for ever.
    """
    line = channel(group_name, "reduce", gradients[0].device)
    if blocked := [word for word in (place.word, *place.awaited) if word in line.under_way]:
        raise TransportError(
            f"gradients of {len(blocked)} launches on group {group_name!r} are still to be summed where the next is to be "
            "put: an earlier step broke off in the middle, or the compiler has moved their sums; start the processes again, "
            "or run with reduction='ring'"
        )
    staging = line.staging(place.capacity_bytes)
    line.stream.wait_event(torch.cuda.current_stream().record_event())
    line.tell_summed(line.stream)
    pieces = tuple(gradient.nbytes // line.ranks for gradient in gradients)
    starts, _ = laid_out(tuple(piece * (line.ranks - 1) for piece in pieces))
    line.take(place.word, place.awaited)
    for peer in line.peers:
        slot = line.rank if line.rank < peer else line.rank - 1
        for gradient, start, piece in zip(gradients, starts, pieces, strict=True):
            target = staging.addresses[peer] + place.offset + start + slot * piece
            driver.copy(line.stream, target, gradient.data_ptr() + peer * piece, piece)
    line.tell_ready(place.word)
    for peer in line.peers:
        line.await_ready(peer, place.word)
    line.under_way[place.word] = _Launch(line.stream.record_event(), len(gradients))
    return [gradient.new_empty(1) for gradient in gradients]


def finish_exchange(gradient: Tensor, total: Total, group_name: str, place: Place) -> Tensor:
    """This rank's rows of the total of the ranks' gradients, once all have arrived; the last of a launch frees its place.

    Args:
        gradient: what was sent, whose own rows are added to what arrives.
        place: where the peers' pieces of this gradient land.
    """
    from overlap_pass.transport.kernels import sum_pieces

    line = channel(group_name, "reduce", gradient.device)
    here, launch = torch.cuda.current_stream(), line.under_way[place.word]
    if not launch.awaited:
        here.wait_event(launch.arrived)  # behind it the gradients' memory may be used again, too
        launch.awaited = True
    rows, *others = gradient.shape
    rows //= line.ranks
    out = torch.empty((rows, *others), dtype=total.dtype, device=gradient.device)
    landed = (line.staging(place.capacity_bytes).typed(gradient.dtype), place.offset // gradient.itemsize)
    sum_pieces(gradient, landed, out, total.factor(line.ranks), (line.rank, line.ranks))
    launch.left -= 1
    if not launch.left:
        del line.under_way[place.word]
        line.summed.append(place.word)
        if not line.under_way:  # perhaps nothing of this graph is sent behind this, which else would tell it
            line.tell_summed(here)
    return out
