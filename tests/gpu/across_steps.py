"""Does a loop with ``StepEdge`` give the bits of one without? ``python -m tests.gpu.across_steps [--device cpu]``

A model is trained twice from the same start, by ``optimizer.step()`` and by ``StepEdge.step()``, through the same backend with the
same options, its gradients clipped where the edge does not run the backward as well. Every launch at the edge is followed by tensors of the sizes of what it sends and receives,
full of NaN and dropped at once: memory that was let go too early would be found there. Before each step a kernel that takes long
holds the compute stream, so that the host is far ahead and gathers run beside the optimizer.

Prints a table, and writes JSON into the folder ``$OUT`` if that is set.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from overlap_pass.fsdp.edge import StepEdge
from overlap_pass.profiling.numbers import reproducible
from overlap_pass.transport import ahead
from tests.cpu.ranks import run_cases
from tests.gpu.small_llama import sharded

__all__ = ["Row", "rows", "written_by_data"]

_RING = {"transport": "nccl", "reduction": "ring"}
_FILLS = 3
_CYCLES = 20_000_000
"""About ten milliseconds."""


@dataclass(frozen=True, slots=True)
class Case:
    backend: str
    options: tuple[tuple[str, str], ...]
    foreach: bool
    whole: bool = False


CASES = {
    "eager, ring, one by one": Case("overlap_eager", tuple(_RING.items()), foreach=False),
    "eager, whatever carries by default": Case("overlap_eager", (), foreach=True),
    "eager, ring, with its backward": Case("overlap_eager", tuple(_RING.items()), foreach=True, whole=True),
    "inductor, with its backward": Case("overlap", (), foreach=True, whole=True),
    "inductor, ring": Case("overlap", tuple(_RING.items()), foreach=True),
    "inductor, whatever carries by default": Case("overlap", (), foreach=True),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        taken: gathers that a graph took from under way.
        fills: tensors of NaN made while gathers were under way.
        differing: losses and parameters that differ in a bit.
    """

    what: str
    device: str
    steps: int
    taken: int
    fills: int
    differing: int


def rows(device: str, steps: int, names: Sequence[str] = tuple(CASES)) -> list[Row]:
    """The cases, on two ranks; of each the rank that differs more."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    outcomes = run_cases({name: partial(side_by_side, name, device, steps) for name in names}, ranks=2, limit_s=560)
    return [max(outcome.values(), key=lambda row: row.differing) for outcome in outcomes.values()]


def side_by_side(name: str, device: str, steps: int) -> Row:
    with reproducible():
        expected = _trained(CASES[name], device, steps, edge=False)
        with _nan_beside() as seen:
            found = _trained(CASES[name], device, steps, edge=True)
    differing = sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True))
    return Row(name, device, steps, seen["taken"], seen["fills"], differing)


def _trained(case: Case, device: str, steps: int, *, edge: bool) -> list[Tensor]:
    """All losses, and parameters at the end."""
    torch._dynamo.reset()
    model, tokens = sharded(device, layers_on_cpu=1)
    call = torch.compile(model, backend=case.backend, fullgraph=True, options=dict(case.options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=case.foreach)
    stepper: Any = StepEdge(model, optimizer) if edge else optimizer
    losses = []
    for _ in range(steps):
        if device != "cpu":
            torch.cuda._sleep(_CYCLES)
        loss = call(tokens, tokens)
        if case.whole and edge:
            stepper.step(loss)
        else:
            loss.backward()
            if not case.whole:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepper.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if edge:
        stepper.close()
    return losses + [parameter.to_local().detach().clone() for parameter in model.parameters()]


@contextmanager
def _nan_beside() -> Iterator[dict[str, int]]:
    """Every launch at the edge is followed by the fills; yields how many there were, and how many launches were taken."""
    seen = {"taken": 0, "fills": 0}
    launch, check = ahead.launch, ahead.UnderWay.check

    def with_fills(*args: Any) -> None:
        launch(*args)
        way = ahead._under_way[-1]
        for tensor in (*way.sent, *way.results, *way.shards):
            for _ in range(_FILLS):
                torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
                seen["fills"] += 1

    def counted(way: ahead.UnderWay) -> None:
        check(way)
        seen["taken"] += 1

    with mock.patch.object(ahead, "launch", with_fills), mock.patch.object(ahead.UnderWay, "check", counted):
        yield seen


def written_by_data(device: str) -> str:
    """What is said where a parameter was written through ``.data`` behind the step. On CUDA the process is of no more use."""
    model, tokens = sharded(device, layers_on_cpu=1)
    call = torch.compile(model, backend="overlap_eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    edge = StepEdge(model, optimizer)
    call(tokens, tokens).backward()
    edge.step()
    next(model.parameters()).data.mul_(0.5)
    try:
        call(tokens, tokens)
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  torch has several for what a device asserts
        return f"{type(error).__name__}: {error}"
    return "nothing was said"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args(argv)
    found = rows(args.device, args.steps)
    print(f"{'':<45}{'steps':>7}{'taken':>7}{'NaN tensors':>13}{'differing':>11}")
    for row in found:
        print(f"{row.what:<45}{row.steps:>7}{row.taken:>7}{row.fills:>13}{row.differing:>11}")
    folder = Path(os.environ.get("OUT", tempfile.gettempdir()))
    record = {"torch": torch.__version__, "rows": [asdict(row) for row in found]}
    (folder / "across-steps.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return 1 if any(row.differing for row in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
