"""A sharded Llama for comparisons of bits: of a size that keeps GPUs busy there, and tiny where a CPU rehearses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_pass.profiling import llama

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
    if device == "cpu":
        return torch.device("cpu")
    place = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(place)
    return place


def group_of(device: str) -> Any:
    """A new group of all ranks."""
    return dist.new_group(backend="gloo" if device == "cpu" else "nccl")
