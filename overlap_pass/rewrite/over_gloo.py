"""All-gathers over gloo, by the one of its two ways that does not break the heap."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed.distributed_c10d import _resolve_process_group

from overlap_pass.transport import ops

__all__ = ["gather_by_base"]

_FUNCTIONAL = torch.ops._c10d_functional
_REPLACED = {
    _FUNCTIONAL.all_gather_into_tensor.default: ops.GATHER_START,
    _FUNCTIONAL.all_gather_into_tensor_coalesced.default: ops.GATHER_START_COALESCED,
}


def gather_by_base(graph: fx.Graph) -> None:
    """Have all-gathers over gloo, in place, use what ``dist.all_gather_into_tensor`` uses.

    The functional all-gather goes through ``ProcessGroupGloo.allgather_into_tensor_coalesced``. With a second collective under
    way that one corrupts the heap now and then (torch 2.11 and 2.13); ``_allgather_base``, which eager FSDP2 uses, does not.
    See ``docs/transport.md``.
    """
    for node in graph.nodes:
        if node.target not in _REPLACED:
            continue
        sent, ranks, group_name = node.args
        value = node.meta["val"]
        first = value[0] if isinstance(value, (list, tuple)) else value
        if first.device.type == "cpu" and _over_gloo(group_name):
            node.target, node.args = _REPLACED[node.target], (sent, first.dtype, ranks, group_name, [])


def _over_gloo(group_name: str) -> bool:
    return "cpu:gloo" in dist.get_backend_config(_resolve_process_group(group_name))
