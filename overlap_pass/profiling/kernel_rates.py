"""What one device does alone: matrix products, attention, streams through its memory, launches.

A GPU that was idle runs matrix products at a higher clock than one that trains, whose power is at its limit: on H200 a
tenth faster. So they are measured behind a while of what a training step does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from overlap_pass.cost.fit import KernelSample
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.stopwatch import Run, Stopwatch

__all__ = [
    "attention_samples",
    "gemm",
    "gemm_samples",
    "kernel_launch_us",
    "least_kernel_us",
    "stream_samples",
    "training_load",
]


def gemm(shape: tuple[int, int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bf16 matrices to multiply: [rows, inner] and [inner, columns]."""
    rows, inner, columns = shape
    options = {"dtype": torch.bfloat16, "device": device}
    return torch.randn(rows, inner, **options), torch.randn(inner, columns, **options)  # type: ignore[arg-type]


def training_load(scale: Scale, device: torch.device) -> Run:
    """Matrix products with passes through memory between them, about as in a training step: a fifth of a second on H200."""
    left, right = gemm(scale.gemms[-1], device)
    out = left @ right
    shards = torch.zeros(scale.streamed_bytes // 4, device=device)
    cast = shards.bfloat16()

    def run() -> None:
        for _ in range(scale.warm_rounds):
            torch.mm(left, right, out=out)
            cast.copy_(shards)

    return run


def gemm_samples(scale: Scale, watch: Stopwatch) -> Iterator[KernelSample]:
    load = training_load(scale, watch.device)
    for shape in scale.gemms:
        left, right = gemm(shape, watch.device)
        out = left @ right
        product = partial(torch.mm, left, right, out=out)
        time_us = watch.queued_us(product, 10, behind=load)
        rows, inner, columns = shape
        yield KernelSample(f"GEMM {rows} × {inner} × {columns}", 2.0 * rows * inner * columns, time_us)


def attention_samples(scale: Scale, watch: Stopwatch) -> Iterator[KernelSample]:
    """Causal attention forward, and forward with backward; work as ``graph.targets`` counts it (half of the matrix)."""
    heads, tokens, width = scale.attention
    query, key, value = (
        torch.randn(1, heads, tokens, width, dtype=torch.bfloat16, device=watch.device, requires_grad=True)
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    load = training_load(scale, watch.device)
    gradient = torch.randn_like(forward())
    product = 2.0 * heads * tokens * tokens * width / 2
    forward_us = watch.queued_us(forward, 5, behind=load)
    both_us = watch.queued_us(lambda: torch.autograd.grad(forward(), (query, key, value), gradient), 5, behind=load)
    yield KernelSample(f"attention of {tokens} tokens, forward", 2 * product, forward_us)
    yield KernelSample(f"attention of {tokens} tokens, with backward", 7 * product, both_us)


def stream_samples(scale: Scale, watch: Stopwatch) -> Iterator[KernelSample]:
    """A copy, a cast from bf16 to fp32, and a pointwise op of two inputs."""
    narrow = torch.zeros(scale.streamed_bytes // 2, dtype=torch.bfloat16, device=watch.device)
    other = torch.zeros_like(narrow)
    wide = torch.zeros(narrow.shape, dtype=torch.float32, device=watch.device)
    for what, moved_bytes, run in (
        ("copy", 2 * scale.streamed_bytes, lambda: other.copy_(narrow)),
        ("cast to fp32", 3 * scale.streamed_bytes, lambda: wide.copy_(narrow)),
        ("pointwise", 3 * scale.streamed_bytes, lambda: torch.add(narrow, other, out=other)),
    ):
        yield KernelSample(what, float(moved_bytes), watch.queued_us(run, 10))


def least_kernel_us(scale: Scale, watch: Stopwatch) -> float:
    """Time of a kernel that does nothing much, in a queue."""
    tiny = torch.zeros(256, device=watch.device)
    return watch.queued_us(lambda: tiny.add_(1), scale.launches)


def kernel_launch_us(scale: Scale, watch: Stopwatch) -> float:
    """Time of the CPU to launch one kernel through PyTorch."""
    tiny = torch.zeros(256, device=watch.device)
    return watch.issued_us(lambda: tiny.add_(1), scale.launches)
