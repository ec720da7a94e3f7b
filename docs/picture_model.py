"""The model that the pictures of these pages show: four blocks of the size of Llama-3-8B's."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_pass.profiling.llama import Llama, LlamaConfig, shard


def build(mesh: DeviceMesh, tokens: int = 4096) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    shape = LlamaConfig(layers=4, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, vocab_size=32000)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    length = min(tokens, 4096)
    batch = torch.zeros((tokens // length, length), dtype=torch.long)
    return shard(Llama(shape), mesh=mesh, mp_policy=policy), (batch, batch)
