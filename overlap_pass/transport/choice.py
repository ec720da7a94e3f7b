"""Who carries a collective: the communicator, or copy engines; decided alike on every rank, without talking."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.config import Reduction, Transport
from overlap_pass.errors import OptionError

__all__ = ["Carriers", "why_not_by_copy"]

_MOST_RANKS = 16
"""Each rank copies from every other: beyond a box of eight or sixteen the copies get too small to fill the link."""


@dataclass(frozen=True)
class Carriers:
    """What the options ``transport`` and ``reduction`` mean for one process.

    Attributes:
        transport: ``"auto"``: copy engines where every rank of the group can reach its peers' memory.
        reduction: ``"auto"``: each rank sums what the others send it where that gives the same bits as the
            communicator's ring, which is on two ranks.
    """

    transport: Transport = "auto"
    reduction: Reduction = "auto"

    def by_copy(self, group_name: str, on_cuda: bool) -> bool:
        """Whether copy engines carry the parameters and gradients of a group.

        Raises:
            OptionError: they are asked for and cannot; the message says why.
        """
        if self.transport == "nccl":
            return False
        if not on_cuda:  # asked for by name, the same graph runs on ordinary collectives
            return self.transport == "copy_engine"
        reason = why_not_by_copy(group_name)
        if reason is not None and self.transport == "copy_engine":
            raise OptionError(f"transport='copy_engine': {reason}; use transport='auto' or 'nccl'")
        return reason is None

    @property
    def identity(self) -> str:
        """What decides besides the graph, for compile caches: the same model may find another machine the next time."""
        return repr((self.transport, self.reduction, *(_machine() if torch.cuda.is_available() else ())))

    def exchanges(self, ranks: int, by_copy: bool, halves: bool) -> bool:
        """Whether a reduction sends gradients as they are and sums them where they arrive.

        Args:
            by_copy: copy engines would carry it.
            halves: what is sent is narrower than what is summed.
        """
        if self.reduction == "auto":
            return ranks == 2 and (by_copy or halves)
        return self.reduction == "exchange"


def why_not_by_copy(group_name: str) -> str | None:
    """Why the ranks of a group cannot copy from each other's memory; ``None`` if they can."""
    group = _resolve_process_group(group_name)
    ranks = dist.get_process_group_ranks(group)
    devices, per_node, p2p_disabled, reachable = _machine()
    if "nccl" not in dist.get_backend_config(group):
        return f"the group's backend is {dist.get_backend(group)}, not NCCL"
    if len(ranks) > _MOST_RANKS:
        return f"the group has {len(ranks)} ranks, and copies are made among at most {_MOST_RANKS}"
    if per_node < 1 or len({rank // per_node for rank in ranks}) > 1:
        return "the group spans nodes"
    if p2p_disabled:
        return "NCCL_P2P_DISABLE=1 forbids access to peers"
    if devices < len(ranks):
        return f"this process sees {devices} GPU of the group's {len(ranks)}, so that access to peers cannot be checked"
    return None if reachable else "the GPUs cannot access each other's memory"


def _machine() -> tuple[int, int, bool, bool]:
    """GPUs that this process sees, ranks on each node, whether access to peers is forbidden, and whether it is there."""
    devices = torch.cuda.device_count()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", min(devices, ranks)))
    here = torch.cuda.current_device()
    others = [device for device in range(devices) if device != here]
    reachable = all(torch.cuda.can_device_access_peer(here, other) for other in others)
    return devices, per_node, os.environ.get("NCCL_P2P_DISABLE") == "1", reachable
