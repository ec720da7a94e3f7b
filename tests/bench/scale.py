"""Planning time against the size of the graph: ``python -m tests.bench.scale [LAYERS ...]``.

Backward graphs as FSDP's, one layer like another: nine parameters each gathered, cast, reduced and cast back, and as many
matmuls, pointwise ops and views between them as a decoder block has, about 260 ops a layer.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import Category, Phase, Program
from overlap_pass.memory.budget import Budget
from overlap_pass.planning import make_plan
from overlap_pass.registry import parse
from tests.pure.programs import Builder

_MIB = 2**20
_WEIGHTS_MIB = (32, 8, 8, 32, 112, 112, 112, 1, 1)


def backward(layers: int) -> Program:
    """A chain of layers, last one first."""
    build = Builder(f"{layers} layers", Phase.BACKWARD)
    value = build.input("tangent", 64 * _MIB)
    saved = [build.input(f"saved{layer}", 256 * _MIB) for layer in range(layers)]
    shards = [
        [build.input(f"shard{layer}_{n}", size * _MIB // 32, held=True) for n, size in enumerate(_WEIGHTS_MIB)]
        for layer in range(layers)
    ]
    returned = []
    for layer in range(layers):
        for number, size_mib in enumerate(_WEIGHTS_MIB):
            tag = f"{layer}_{number}"
            value, reduced = _parameter(build, tag, (value, saved[layer], shards[layer][number]), size_mib * _MIB)
            returned.append(reduced)
    return build.output(value, *returned)


def _parameter(build: Builder, tag: str, sources: tuple[str, str, str], size_bytes: int) -> tuple[str, str]:
    value, saved, shard = sources
    layer = tag.partition("_")[0]
    cast = build.cast(f"cast{tag}", shard, size_bytes // 64)
    gather = build.all_gather(f"ag{tag}", cast, size_bytes, unit=f"blocks.{layer}")
    weight = build.view(f"view{tag}", build.wait(f"w{tag}", gather))
    flops = 2 * 8192 * size_bytes // 2
    gradient = build.compute(f"dw{tag}", value, saved, size_bytes=size_bytes, flops=flops)
    wide = build.cast(f"wide{tag}", gradient, 2 * size_bytes)
    reduced = build.wait(f"rw{tag}", build.reduce_scatter(f"rs{tag}", wide, size_bytes // 32))
    value = build.compute(f"dx{tag}", value, weight, size_bytes=64 * _MIB, flops=flops)
    for step in range(9):
        value = build.view(f"v{tag}_{step}", value)
        value = build.compute(f"p{tag}_{step}", value, size_bytes=64 * _MIB, category=Category.POINTWISE)
    return value, build.cast(f"out{tag}", reduced, size_bytes // 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layers", nargs="*", type=int, default=[8, 32, 135], help="layers of each graph")
    parser.add_argument("--strategy", default="latest_start", help="strategy spec (%(default)s)")
    args = parser.parse_args(argv)
    print(f"{'ops':>7} {'collectives':>12} {'planning s':>11} {'per op µs':>10} {'peak RSS MiB':>13} {'gap %':>6}")
    for layers in args.layers:
        program = backward(layers)
        began_s = time.process_time()
        plan = make_plan(program, load_hardware("h100"), parse(args.strategy), Budget.parse("fsdp2"))
        planning_s = time.process_time() - began_s
        used_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{len(program.ops):>7} {len(program.launches):>12} {planning_s:>11.1f} "
            f"{1e6 * planning_s / len(program.ops):>10.0f} {used_mib:>13.0f} {plan.gap_percent:>6.1f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
