"""What collectives cost: α–β, in bytes that cross the link of one rank.

``time = α(n) + max(crossing, saturation) / bandwidth``, with for a group of n ranks and a full tensor of S bytes:

=======================================  =====================
all-gather, reduce-scatter, all-to-all   crossing (n - 1)/n S
all-reduce                               crossing 2 (n - 1)/n S
broadcast and others                     crossing S
=======================================  =====================

Simplifications, all on purpose:

- Every collective is a ring: α grows by one hop for each further rank, an all-reduce passes the ring twice. Trees
  and in-switch reduction (NVLS, SHARP) have a smaller α for large groups.
- A group has ``ranks_per_node`` members on each node it touches, by default as many as the node has GPUs: groups are
  packed. A group that strides over nodes (the replicas of a hybrid-sharded mesh) must be told.
- Where a group spans nodes, its ring enters and leaves a node through the adapters of all its members there, so
  each rank gets ``min(intra bandwidth, members on a node * inter bandwidth)``. An all-to-all cannot share a transfer
  between the members of a node: what leaves the node goes through each rank's own adapter. Where the link has a rate of
  its own for it, that counts, also for gradients that are exchanged and summed on arrival.
"""

from __future__ import annotations

from dataclasses import replace

from overlap_pass.cost.hardware import Hardware, Link
from overlap_pass.graph.program import Collective, CollectiveKind

__all__ = ["collective_us", "crossing_bytes", "link_of"]


def link_of(group_size: int, hardware: Hardware, ranks_per_node: int | None = None) -> str:
    """The wire that limits a group: ``"intra_node"`` or ``"inter_node"``."""
    return "intra_node" if group_size <= _per_node(group_size, hardware, ranks_per_node) else "inter_node"


def collective_us(collective: Collective, hardware: Hardware, ranks_per_node: int | None = None) -> float:
    """Time of one collective alone on its group.

    Args:
        collective: what is sent, and among how many ranks.
        hardware: the links.
        ranks_per_node: members of the group on each node; ``None`` for a packed group.
    """
    size = collective.group_size
    if size <= 1:  # NCCL copies within the device
        return hardware.compute.kernel_us + hardware.traffic_us(2 * collective.payload_bytes)
    if collective.by_copy and hardware.copy_engine is not None:
        engine = hardware.copy_engine
        return engine.latency_us + crossing_bytes(collective) / (engine.bandwidth_gb_per_s * 1e3)
    local = _per_node(size, hardware, ranks_per_node)
    rounds = 2 if collective.kind is CollectiveKind.ALL_REDUCE else 1
    nodes = -(-size // local)
    if nodes == 1:
        alpha_us = hardware.intra_node.latency_us + rounds * (size - 1) * hardware.intra_node.hop_us
        return alpha_us + _transfer_us(crossing_bytes(collective), _wire(collective, hardware.intra_node))
    hops_us = (nodes - 1) * hardware.inter_node.hop_us + (size - nodes) * hardware.intra_node.hop_us
    alpha_us = hardware.inter_node.latency_us + rounds * hops_us
    if _direct(collective):
        leaving_bytes = collective.payload_bytes * (size - local) / size
        staying_bytes = collective.payload_bytes * (local - 1) / size
        inter, intra = (_wire(collective, link) for link in (hardware.inter_node, hardware.intra_node))
        return alpha_us + max(_transfer_us(leaving_bytes, inter), _transfer_us(staying_bytes, intra))
    return alpha_us + max(
        _transfer_us(crossing_bytes(collective) / local, hardware.inter_node),
        _transfer_us(crossing_bytes(collective), hardware.intra_node) if local > 1 else 0.0,
    )


def _per_node(group_size: int, hardware: Hardware, ranks_per_node: int | None) -> int:
    return min(group_size, hardware.node.gpus if ranks_per_node is None else ranks_per_node)


def crossing_bytes(collective: Collective) -> float:
    """Bytes that cross the link of one rank."""
    size, payload_bytes = collective.group_size, collective.payload_bytes
    match collective.kind:
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return payload_bytes * (size - 1) / size
        case CollectiveKind.ALL_REDUCE:
            return 2 * payload_bytes * (size - 1) / size
        case _:
            return float(payload_bytes)


def _direct(collective: Collective) -> bool:
    return collective.direct or collective.kind is CollectiveKind.ALL_TO_ALL


def _wire(collective: Collective, link: Link) -> Link:
    """The link as a collective finds it."""
    if link.all_to_all_gb_per_s is None or not _direct(collective):
        return link
    return replace(link, bandwidth_gb_per_s=link.all_to_all_gb_per_s)


def _transfer_us(crossing_bytes: float, link: Link) -> float:
    return max(crossing_bytes, link.saturation_mb * 1e6) / (link.bandwidth_gb_per_s * 1e3)
