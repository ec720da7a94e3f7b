"""A Llama of Hugging Face transformers, built from a config (nothing is downloaded), with its own loss.

pip install transformers
torchrun --nproc-per-node 2 examples/hugging_face_llama.py
torchrun --nproc-per-node 2 examples/hugging_face_llama.py --backend overlap_eager
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
TOKENS = 2048 if CUDA else 32
CONFIG = LlamaConfig(
    vocab_size=32000 if CUDA else 256,
    hidden_size=2048 if CUDA else 64,
    intermediate_size=5632 if CUDA else 128,
    num_hidden_layers=16 if CUDA else 2,
    num_attention_heads=16 if CUDA else 4,
    num_key_value_heads=4 if CUDA else 2,
    max_position_embeddings=TOKENS,
    use_cache=False,
)


def make_model() -> LlamaForCausalLM:
    """fp32 shards, bf16 in compute, gradients reduced in fp32; a unit for each decoder layer."""
    torch.manual_seed(0)
    with DEVICE:
        model = LlamaForCausalLM(CONFIG)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="overlap")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = torch.compile(model, backend=args.backend, fullgraph=True)
    torch.manual_seed(1 + dist.get_rank())
    text = torch.randint(CONFIG.vocab_size, (2, TOKENS), device=DEVICE)
    for step in range(1, args.steps + 1):
        loss = compiled(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
