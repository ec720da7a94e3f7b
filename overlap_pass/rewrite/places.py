"""Places in staging memory for what copy engines carry, once the order of a graph is settled."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from overlap_pass.errors import IllegalSchedule
from overlap_pass.graph.program import CollectiveKind, Lease
from overlap_pass.memory.places import WORDS, Place, Tenancy, Tenants, bits, laid_out, tenancies
from overlap_pass.memory.staging import at_once
from overlap_pass.transport import ops

__all__ = ["DISPLACED", "give_places"]

DISPLACED = "overlap_pass_displaced"
"""Key in ``node.meta``: names of launches whose results lay, themselves, where this one puts its own."""

_GATHERS = {ops.GATHER_START, ops.GATHER_START_COALESCED}
_EXCHANGES = {ops.EXCHANGE_START, ops.EXCHANGE_START_COALESCED}


def give_places(graph: fx.Graph, leases: Mapping[str, Lease] | None = None) -> None:
    """Fill in, in place, the argument ``place`` of every launch and sum by copy.

    A gradient may be asked for long after its place is needed by another: then it is summed right before that one is sent,
    in the order of the graph. It was ready to be summed all along, so this is legal; and it must be, for a place that
    became free only behind the launch that needs it would keep all ranks waiting for ever.

    Args:
        leases: gathers that have their places already, for all launches of a group or for none.

    Raises:
        IllegalSchedule: a lease is of another launch than that of its name.
    """
    for (_, kind), launches in _channels(graph).items():
        gathers = kind is CollectiveKind.ALL_GATHER
        if gathers and leases and launches[0].node.name in leases:
            _put_leased(launches, leases)
            continue
        found = tenancies([launch.size_bytes for launch in launches], at_once(kind), leaves_nothing=gathers)
        for launch, tenancy in zip(launches, found, strict=True):
            _put(launch.node, tenancy.place)
            for start, finish in zip(launch.starts, launch.finishes, strict=bool(launch.finishes)):
                _put(finish, tenancy.place.shifted(start))
        _sum_in_time(launches, found)


def _put_leased(launches: Sequence[_Launch], leases: Mapping[str, Lease]) -> None:
    """Places of gathers of which results lie there themselves; the nodes note whose places they take."""
    tenants, final = Tenants(), [_final(launch, leases[launch.node.name]) for launch in launches]
    for number, launch in enumerate(launches):
        lease = leases[launch.node.name]
        gone, over = tenants.take(lease.offset_bytes, lease.end_bytes, any(lease.final))
        awaited = () if over is None else (over % WORDS,)
        _put(launch.node, Place(lease.capacity_bytes, lease.offset_bytes, number % WORDS, awaited, final[number]))
        launch.node.meta[DISPLACED] = [launches[tenant].node.name for tenant in gone]


def _final(launch: _Launch, lease: Lease) -> int:
    """Bit by bit, which results lie there."""
    final = bits(lease.final)
    _, size_bytes = laid_out(launch.sizes, final, launch.node.args[2])
    if len(lease.final) != len(launch.sizes) or size_bytes != lease.size_bytes:
        raise IllegalSchedule(f"{launch.node.name} takes {size_bytes} bytes of its place of {lease.size_bytes}")
    return final


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch by copy.

    Attributes:
        sizes: bytes of what it sends, by tensor.
        starts: of its tensors, from the beginning of its place.
        finishes: its sums, if it is of gradients, in the order of its tensors.
    """

    node: fx.Node
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    size_bytes: int
    finishes: tuple[fx.Node, ...] = ()


def _channels(graph: fx.Graph) -> dict[tuple[str, CollectiveKind], list[_Launch]]:
    """Launches by copy, in order, by group and kind."""
    found: dict[tuple[str, CollectiveKind], list[_Launch]] = {}
    for node in graph.nodes:
        if node.target in _GATHERS:
            _, dtype, _, group_name, _ = node.args
            shards = _tensors(node)
            sizes = tuple(shard.meta["val"].numel() * dtype.itemsize for shard in shards)
            launch = _Launch(node, sizes, *laid_out(sizes))
            found.setdefault((group_name, CollectiveKind.ALL_GATHER), []).append(launch)
        elif node.target in _EXCHANGES and node.args[4]:
            _, _, ranks, group_name, _, _ = node.args
            sizes = tuple(gradient.meta["val"].nbytes // ranks * (ranks - 1) for gradient in _tensors(node))
            launch = _Launch(node, sizes, *laid_out(sizes))
            found.setdefault((group_name, CollectiveKind.REDUCE_SCATTER), []).append(
                replace(launch, finishes=tuple(_finishes(node)))
            )
    return found


def _tensors(launch: fx.Node) -> Sequence[fx.Node]:
    sent: Any = launch.args[0]
    return sent if isinstance(sent, (list, tuple)) else [sent]


def _finishes(launch: fx.Node) -> Iterator[fx.Node]:
    """The sums of a launch in the order of what it sends."""
    parts = [user for user in launch.users if user.target is operator.getitem]
    for token in sorted(parts, key=lambda part: int(part.args[1])) or [launch]:  # type: ignore[arg-type]
        (finish,) = token.users
        yield finish


def _sum_in_time(launches: Sequence[_Launch], found: Sequence[Tenancy]) -> None:
    """Move the sums of earlier tenants before the launch that needs their place."""
    order = {node: position for position, node in enumerate(launches[0].node.graph.nodes)}
    for launch, tenancy in zip(launches, found, strict=True):
        for earlier in tenancy.after:
            for finish in launches[earlier].finishes:
                if order[finish] > order[launch.node]:
                    launch.node.prepend(finish)


def _put(node: fx.Node, place: Place) -> None:
    node.args = (*node.args[:-1], place.numbers)
