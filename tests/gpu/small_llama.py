"""A sharded Llama for comparisons of bits: of a size that keeps GPUs busy there, and tiny where a CPU rehearses.

Where a machine has fewer GPUs than ranks, ranks share one. NCCL refuses that, so their groups are gloo's; but the memory of
one is within reach of the other like that of any peer, and copies, words and recorded graphs are the same. Times mean
nothing there, bits do.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_pass.profiling import llama
from overlap_pass.transport import choice

__all__ = ["group_of", "place_of", "sharded"]

_POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(device: str, *, layers_on_cpu: int) -> tuple[nn.Module, Tensor]:
    """The model, the same on every rank, and this rank's tokens."""
    place = place_of(device)
    mesh = DeviceMesh.from_group(group_of(device), device)
    small = llama.LlamaConfig(layers_on_cpu, 32, 4, 2, 64, 64, max_tokens=16)
    shape = small if device == "cpu" else llama.LlamaConfig(4, 1024, 8, 4, 4096, 8192, max_tokens=1024)
    torch.manual_seed(0)
    with place:
        model = llama.shard(llama.Llama(shape), mesh=mesh, mp_policy=_POLICY)
        torch.manual_seed(1 + dist.get_rank())
        tokens = torch.randint(shape.vocab_size, (2, shape.max_tokens))
    return model, tokens


def place_of(device: str) -> torch.device:
    """The CPU, or this rank's GPU, which is current from then on."""
    if device == "cpu":
        return torch.device("cpu")
    if _shared():
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        choice.why_not_by_copy = lambda group_name: None  # asks for NCCL and for a GPU each, which is what is not there
    place = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(place)
    return place


def group_of(device: str) -> Any:
    """A new group of all ranks."""
    return dist.new_group(backend="gloo" if device == "cpu" or _shared() else "nccl")


def _shared() -> bool:
    return torch.cuda.device_count() < dist.get_world_size()
