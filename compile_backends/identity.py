"""What must be in a compile cache's key so that a cached graph was scheduled as this call would."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.fx as fx

import overlap_pass
from overlap_pass.fsdp.gather import gathers_in
from overlap_pass.graph.read import ANNOTATION

__all__ = ["capture_digest", "place_in_world", "rank_of_world", "source_digest"]


@cache
def source_digest() -> str:
    """Digest of this package's own code and hardware files: a changed planner never meets an old plan."""
    root = Path(overlap_pass.__file__).parent
    digest = hashlib.sha256()
    for path in sorted((*root.rglob("*.py"), *root.rglob("*.toml"), *Path(__file__).parent.glob("*.py"))):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def place_in_world() -> tuple[int, int]:
    """Which rank this is, and of how many."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def rank_of_world() -> str:
    """Which rank this is. Ranks of a node share a cache directory, and their graphs differ in what no key of torch's tells:
    shards of other sizes, and whatever a sharded op made of the rank's number."""
    rank, ranks = place_in_world()
    return f"{rank}of{ranks}"


def capture_digest(gm: fx.GraphModule) -> str:
    """Digest of what the capture notes on nodes (unit, parameter, reshard, ahead), which torch's own cache keys leave out."""
    notes: list[Any] = [(asdict(spec), reshard) for spec, reshard in gathers_in(gm)]
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                note = (node.meta.get("custom") or {}).get(ANNOTATION)
                if note is not None:
                    notes.append(note)
    return hashlib.sha256(json.dumps(notes, sort_keys=True, default=str).encode()).hexdigest()[:16]
