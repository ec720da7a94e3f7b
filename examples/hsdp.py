"""Hybrid sharding: shards inside a group of ranks (a node, say), replicas across groups.

    torchrun --nproc-per-node 4 examples/hsdp.py --replicas 2
    torchrun --nproc-per-node 4 examples/hsdp.py --replicas 2 --backend overlap_eager

Gradients are reduced twice, by a reduce-scatter inside the group and an all-reduce across groups; both are in the graph and
both are scheduled.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
WIDTH, LAYERS, BATCH = (4096, 8, 4096) if CUDA else (64, 3, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2, help="groups that each hold the whole model")
    parser.add_argument("--backend", default="overlap")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    shape = args.replicas, dist.get_world_size() // args.replicas
    mesh = init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard"))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(DEVICE)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)

    torch.manual_seed(1 + dist.get_rank())
    inputs, targets = torch.randn(2, BATCH, WIDTH, device=DEVICE)
    for step in range(1, args.steps + 1):
        loss = nn.functional.mse_loss(compiled(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
