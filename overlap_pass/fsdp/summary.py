"""What was captured, in a line: for a model's representation, the log and a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.fx import GraphModule

from overlap_pass.fsdp.gather import GatherSpec, gather
from overlap_pass.units import format_bytes

__all__ = ["captured", "summary"]


def summary(found: Mapping[GatherSpec, torch.dtype]) -> str:
    """The parameters that are gathered, with the dtype of each shard.

    ``30 parameters, 24.0 KiB gathered as bfloat16 over 4 ranks (group 1) × 2 replicas, gradients reduced as float32``
    """
    if not found:
        return "no parameters of its own"
    gathered = {spec: spec.gather_dtype(dtype) for spec, dtype in found.items()}
    size_bytes = sum(torch.Size(spec.shape).numel() * dtype.itemsize for spec, dtype in gathered.items())
    reduced = _joined(_name(spec.reduced_dtype(dtype)) for spec, dtype in found.items())
    ranks = _joined(f"{spec.shard_ranks} ranks (group {spec.shard_group})" for spec in found)
    replicas = _joined(f" × {spec.replicate_ranks} replicas" for spec in found if spec.replicate_ranks > 1)
    return (
        f"{len(found)} parameters, {format_bytes(size_bytes)} gathered as {_joined(map(_name, gathered.values()))} over "
        f"{ranks}{replicas}, gradients reduced as {reduced}"
    )


def captured(gm: GraphModule) -> str | None:
    """The same of what a Dynamo graph gathers, and how many units that is; ``None`` if it gathers nothing."""
    found: dict[GatherSpec, torch.dtype] = {}
    for module in gm.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.target is gather:
                found[GatherSpec.from_json(node.args[1])] = node.args[0].meta["example_value"].dtype
    units = len({spec.unit for spec in found})
    return f"{units} units, {summary(found)}" if found else None


def _joined(words: Iterable[str]) -> str:
    return "/".join(sorted(set(words)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
