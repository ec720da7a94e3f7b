"""Gradient accumulation with clipping: several micro-batches a step, one optimizer step, the norm of all gradients bounded.

    torchrun --nproc-per-node 2 examples/accumulate.py
    torchrun --nproc-per-node 2 examples/accumulate.py --backend overlap_eager --micro-batches 3

Gradients of micro-batches add up in their shards, and the schedule hides what each of them sends. Nothing
compiles again between micro-batches. Gradients are sharded tensors, so ``clip_grad_norm_`` bounds the norm over all ranks.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
WIDTH, LAYERS, BATCH = (4096, 8, 4096) if CUDA else (64, 3, 32)
MOST = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--backend", default="overlap")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(DEVICE)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)

    torch.manual_seed(1 + dist.get_rank())
    batches = torch.randn(args.micro_batches, 2, BATCH, WIDTH, device=DEVICE)
    for step in range(1, args.steps + 1):
        total = torch.zeros((), device=DEVICE)
        for inputs, targets in batches:
            loss = nn.functional.mse_loss(compiled(inputs), targets) / args.micro_batches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item():.4f}, gradient norm {norm.item():.1e} before clipping", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
