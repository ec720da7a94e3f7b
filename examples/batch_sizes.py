"""How a step grows with the batch, measured: eager FSDP2 beside the overlap backend, drawn into one SVG.

    torchrun --nproc-per-node 2 examples/batch_sizes.py --rows 1024,2048,4096,8192
    torchrun --nproc-per-node 2 examples/batch_sizes.py --backend overlap_eager --rows 8,16,32

FSDP sends the same bytes whatever the batch, and compute grows with it. So the time per row falls until communication is
hidden, and stays there: ``overlap-pass sweep`` predicts where, for clusters that are not there. A CPU shows how the chart is
made and nothing about GPUs.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if CUDA else torch.device("cpu")
WIDTH, LAYERS = (4096, 8) if CUDA else (64, 3)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).to(DEVICE)
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def step_ms(run: Callable[[Tensor], Tensor], rows: int, steps: int) -> float:
    """Median of the steps behind the first two; all ranks must agree on a step, so the slowest rank counts."""
    inputs = torch.randn(rows, WIDTH, device=DEVICE)
    times = torch.zeros(steps, device=DEVICE)
    for number in range(-2, steps):
        dist.barrier()
        begin = time.perf_counter()
        run(inputs).square().mean().backward()
        if CUDA:
            torch.cuda.synchronize()
        if number >= 0:
            times[number] = 1000 * (time.perf_counter() - begin)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return median(times.tolist())


def chart(title: str, rows: list[int], lines: dict[str, list[float]]) -> str:
    """Microseconds per row against rows, as SVG; the lines are told apart by dashes too."""
    highest = max(max(values) for values in lines.values())
    x = [80 + 480 * i / max(1, len(rows) - 1) for i in range(len(rows))]
    parts = ['<rect width="800" height="360" fill="white"/>']  # also where the page around it is dark
    parts.append(f'<text x="20" y="24" font-weight="bold">{title}</text>')
    for number, (name, values) in enumerate(lines.items()):
        points = [(px, 300 - 240 * value / highest) for px, value in zip(x, values, strict=True)]
        look = f'stroke="{("#0072b2", "#d55e00")[number]}" stroke-dasharray="{("none", "6 3")[number]}"'
        path = " ".join(f"{px:.0f},{py:.0f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke-width="2" {look}/>')
        parts.append(
            f'<line x1="600" x2="630" y1="{80 + 20 * number}" y2="{80 + 20 * number}" stroke-width="2" {look}/>'
        )
        parts.append(f'<text x="640" y="{84 + 20 * number}">{name}</text>')
    parts += [f'<text x="{px:.0f}" y="320" text-anchor="middle">{n}</text>' for px, n in zip(x, rows, strict=True)]
    parts.append(
        f'<text x="70" y="64" text-anchor="end">{highest:.1f}</text><text x="70" y="304" text-anchor="end">0</text>'
    )
    parts.append(
        '<text x="320" y="344" text-anchor="middle">rows a rank and step</text><text x="20" y="44">µs a row</text>'
    )
    said = f'role="img" aria-label="{title}: microseconds a row against rows a step, falling"'
    style = f'{said} font-family="sans-serif" font-size="13"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 360" {style}>{"".join(parts)}</svg>\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1024,2048,4096,8192,16384" if CUDA else "16,32,64,128")
    parser.add_argument("--backend", default="overlap")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("batch-sizes.svg"))
    args = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=DEVICE if CUDA else None)

    rows = [int(number) for number in args.rows.split(",")]
    eager = make_model()
    compiled = torch.compile(make_model(), backend=args.backend, fullgraph=True, dynamic=False)
    lines = {}
    for name, run in (("eager FSDP2", eager), (args.backend, compiled)):
        lines[name] = [1000 * step_ms(run, number, args.steps) / number for number in rows]
    if dist.get_rank() == 0:
        for position, number in enumerate(rows):
            times = ", ".join(f"{name} {values[position]:.2f} µs a row" for name, values in lines.items())
            print(f"{number} rows: {times}")
        title = f"{dist.get_world_size()} × {torch.cuda.get_device_name() if CUDA else 'CPU'}, width {WIDTH}"
        args.output.write_text(chart(title, rows, lines), encoding="utf-8")
        print(f"{args.output}: open it in a browser", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
