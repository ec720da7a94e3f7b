"""Are tensors that a running collective reads or writes left alone? ``python -m tests.gpu.buffers [--device cpu]``

*NaN beside*: a model is trained through ``overlap_eager`` while every launch is followed by tensors of the sizes of what it sends,
full of NaN and dropped at once. What is sent is a temporary whose last name is gone by then: if its memory were handed out
before the collective has read it, the NaN would arrive at a peer. With and without expandable segments.

*Two communicators*: gathers on one and all-reduces on the other run beside matrix products, again and again, and every result
must be the first one bit for bit.

Prints a table, and writes JSON into the folder ``$OUT`` if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn

from compile_backends.compilation import Compilation
from overlap_pass.graph.targets import collective_kind
from overlap_pass.profiling.numbers import reproducible
from tests.cpu.ranks import run_cases
from tests.gpu.small_llama import group_of, place_of, sharded

__all__ = ["Row", "rows"]

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_FILLS = 3
_CARRIERS = {
    "communicator": {"transport": "nccl", "reduction": "ring"},
    "communicator, exchange": {"transport": "nccl", "reduction": "exchange"},
    "whatever carries by default": {},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        fills: tensors of NaN made while collectives ran, in all repetitions; 0 where that is not what is tried.
        differing: repetitions of which a result differed in a bit from the reference, on any rank.
    """

    what: str
    device: str
    allocator: str
    repetitions: int
    fills: int
    differing: int


ALLOCATORS = ("", "expandable_segments:True")


def rows(device: str, repetitions: int, iterations: int, allocators: Sequence[str] = ALLOCATORS) -> list[Row]:
    """Everything, on two ranks; each setting of the allocator in processes of its own."""
    found: list[Row] = []
    for allocator in allocators if device == "cuda" else ("",):
        cases: dict[str, Callable[[], Row]] = {
            f"NaN beside, {carrier}": partial(nan_beside, carrier, device, repetitions) for carrier in _CARRIERS
        }
        cases["two communicators"] = partial(two_communicators, device, iterations)
        with mock.patch.dict(os.environ, {ALLOCATOR: allocator, "NCCL_NVLS_ENABLE": "0"}):
            outcomes = run_cases(cases, ranks=2, limit_s=560)
        found += [max(outcome.values(), key=lambda row: row.differing) for outcome in outcomes.values()]
    return found


# -- NaN beside


def nan_beside(carrier: str, device: str, repetitions: int) -> Row:
    with reproducible():
        step = _training_step(carrier, device)
        expected = step()
        torch._dynamo.reset()
        with _nan_after_launches() as fills:
            step = _training_step(carrier, device)
            differing = sum(not _same(expected, step()) for _ in range(repetitions))
    row = f"NaN beside, {carrier}"
    return Row(row, device, os.environ[ALLOCATOR], repetitions, len(fills) * repetitions, differing)


def _training_step(carrier: str, device: str) -> Callable[[], list[Tensor]]:
    """Loss and gradients of the same step on every call."""
    model, tokens = sharded(device, layers_on_cpu=2)
    options = {"memory_budget": "unlimited", "strategy": "greedy", **_CARRIERS[carrier]}
    call: nn.Module = torch.compile(model, backend="overlap_eager", fullgraph=True, options=options)

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = call(tokens, tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.to_local().clone() for p in model.parameters() if p.grad is not None)]

    return step


@contextmanager
def _nan_after_launches() -> Iterator[list[str]]:
    """Every launch of a graph planned meanwhile is followed by the fills; yields a name for each of them in the graphs."""
    fills: list[str] = []
    schedule = Compilation.schedule

    def with_fills(compilation: Compilation, graph: torch.fx.Graph) -> None:
        schedule(compilation, graph)
        for node in [node for node in graph.nodes if collective_kind(node.target) is not None]:
            for sent in [value.meta["val"] for value in node.all_input_nodes if "val" in value.meta]:
                with graph.inserting_after(node):
                    for _ in range(_FILLS):
                        like = {"dtype": sent.dtype, "device": sent.device}
                        graph.call_function(torch.ops.aten.full.default, (list(sent.shape), float("nan")), like)
                        fills.append(node.name)

    with mock.patch.object(Compilation, "schedule", with_fills):
        yield fills


# -- two communicators


def two_communicators(device: str, iterations: int) -> Row:
    place = place_of(device)
    gathering, reducing = (group_of(device).group_name for _ in range(2))
    width, layers = (16, 3) if device == "cpu" else (4096, 6)
    torch.manual_seed(dist.get_rank())
    with place:
        x = torch.randn(width, width, dtype=torch.bfloat16) / width**0.5
        shards = [torch.randn(width // 2, width, dtype=torch.bfloat16) / width**0.5 for _ in range(layers)]

    def chain(x: Tensor, *shards: Tensor) -> Tensor:
        total = x
        for shard in shards:
            weight = collectives.all_gather_tensor(shard * 1.0, 0, gathering)
            side = collectives.all_reduce(total * 0.5, "sum", reducing)
            for _ in range(3):
                x = torch.tanh(x @ x)
            total = x @ weight + side
        return total

    options = {"memory_budget": "unlimited", "strategy": "greedy"}
    call = torch.compile(chain, backend="overlap_eager", fullgraph=True, options=options)
    expected = call(x, *shards).clone()
    differing = torch.zeros((), dtype=torch.int64, device=place)
    for _ in range(iterations):  # nothing here waits for the device, so that the CPU runs ahead
        differing += (call(x, *shards) != expected).any()
    return Row("two communicators", device, os.environ[ALLOCATOR], iterations, 0, int(differing))


def _same(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repetitions", type=int, default=20, help="steps with NaN beside (%(default)s)")
    parser.add_argument("--iterations", type=int, default=500, help="runs of two communicators (%(default)s)")
    parser.add_argument("--allocator", choices=ALLOCATORS, help="one setting only (both)")
    args = parser.parse_args(argv)
    allocators = ALLOCATORS if args.allocator is None else (args.allocator,)
    found = rows(args.device, args.repetitions, args.iterations, allocators)
    print(f"{'':<45}{'allocator':<28}{'repetitions':>12}{'NaN tensors':>13}{'differing':>11}")
    for row in found:
        print(f"{row.what:<45}{row.allocator or 'default':<28}{row.repetitions:>12}{row.fills:>13}{row.differing:>11}")
    folder = Path(os.environ.get("OUT", tempfile.gettempdir()))
    record = {"torch": torch.__version__, "device": _name(args.device), "rows": [asdict(row) for row in found]}
    name = "buffers.json" if args.allocator is None else f"buffers-{args.allocator or 'default'}.json".replace(":", "-")
    (folder / name).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 1 if any(row.differing for row in found) else 0


def _name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(0)


if __name__ == "__main__":
    raise SystemExit(main())
