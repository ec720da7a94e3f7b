"""Train a Llama-style model with FSDP2 and the overlap backend: two CPU processes, or as many GPUs as there are.

    torchrun --nproc-per-node 2 examples/llama.py
    torchrun --nproc-per-node 8 examples/llama.py --model llama3-8b --tokens 8192 --report overlap.html

``overlap-pass verify`` calls ``make_step`` of this file on each rank to measure the same work before and after.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from overlap_pass.profiling.llama import Llama, preset

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
SEQUENCE_TOKENS = 4096


def make_model(name: str, replicas: int = 1) -> nn.Module:
    """A sharded model: fp32 shards, bf16 in compute, gradients reduced in fp32, gathered again in backward.

    With several replicas each of as many groups of ranks holds all of it (HSDP). It is built whole on each device before it is
    sharded, so that every rank and every call starts from the same weights.
    """
    torch.manual_seed(0)
    with DEVICE:
        model = Llama(preset(name))
    groups = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh(DEVICE.type, groups, mesh_dim_names=("replicate", "shard"))
    if replicas == 1:
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_batch(name: str, tokens: int) -> tuple[Tensor, Tensor]:
    """Random tokens and targets of this rank, in sequences of at most 4096; both [batch, tokens]."""
    length = min(tokens, SEQUENCE_TOKENS, preset(name).max_tokens)
    torch.manual_seed(1 + dist.get_rank())
    text = torch.randint(preset(name).vocab_size, (max(1, tokens // length), length + 1), device=DEVICE)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def step(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Forward and backward; returns the loss."""
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach()


def make_step(
    model: str = "bench-2b" if CUDA else "tiny", tokens: int = 4096 if CUDA else 128, replicas: int = 1
) -> tuple[nn.Module, Callable[..., Tensor], tuple[Tensor, Tensor]]:
    """What is measured: the model before ``torch.compile``, and ``step(model, *batch)`` with its batch."""
    return make_model(model, replicas), step, make_batch(model, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bench-2b" if CUDA else "tiny")
    parser.add_argument("--tokens", type=int, default=4096 if CUDA else 128, help="per rank and step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--backend", default="overlap")
    parser.add_argument("--strategy")
    parser.add_argument("--memory-budget")
    parser.add_argument("--report", help="write the before/after report here")
    args = parser.parse_args()

    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)
    model = make_model(args.model)
    batch = make_batch(args.model, args.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = {name: getattr(args, name) for name in ("strategy", "memory_budget", "report") if getattr(args, name)}
    compiled = torch.compile(model, backend=args.backend, fullgraph=True, options=options)
    for number in range(1, args.steps + 1):
        start = time.perf_counter()
        loss = step(compiled, *batch).item()
        optimizer.step()
        optimizer.zero_grad()
        if CUDA:
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(f"step {number}: loss {loss:.4f}, {1000 * (time.perf_counter() - start):.1f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
