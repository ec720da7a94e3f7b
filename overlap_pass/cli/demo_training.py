"""The training half of the demo: the same steps with eager FSDP2 and with the backend, compared bit for bit.

Two gloo ranks run in processes of their own. Each trains the small model twice from the same seed and compares its
own shards of every gradient after every step, so nothing but counts and losses has to travel.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from overlap_pass.errors import CaptureError, EnvironmentRefused
from overlap_pass.fsdp.convert import is_traceable
from overlap_pass.profiling.llama import PRESETS, Llama, shard

__all__ = ["TrainingReport", "compare_training"]

RANKS = 2
STEPS = 3
TOKENS = 64
BATCH = 2
LIMIT_S = 300


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """What two trainings from the same seed had in common.

    Attributes:
        losses_eager, losses_overlap: one per step, of rank 0.
        gradients: gradient shards compared, over all steps and ranks.
        differing: names of the parameters whose gradient differed in any bit, on any rank, in any step.
    """

    losses_eager: tuple[float, ...]
    losses_overlap: tuple[float, ...]
    gradients: int
    differing: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return self.losses_eager == self.losses_overlap and not self.differing

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "equal": self.equal}


@dataclass(frozen=True, slots=True)
class _Run:
    """Per step: the loss, and every gradient shard by parameter name."""

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Tensor], ...]


def compare_training(show: Callable[[str], None]) -> TrainingReport:
    """Train on two ranks, eager and with ``overlap_eager``; ``show`` is told what is going on.

    Raises:
        EnvironmentRefused: this torch has no gloo.
        CaptureError: a rank failed or the time limit passed; no process is left behind.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise EnvironmentRefused("the demo trains over gloo, which this torch was built without; use --skip-training")
    news: SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    deadline = time.monotonic() + LIMIT_S
    # torch logs that it ends the other ranks when one has failed; the error says all that the user needs.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="overlap-pass-demo-") as folder:
        context = mp.spawn(_rank, (folder, news), nprocs=RANKS, join=False)
        try:
            return _follow(context, news, show, deadline)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _follow(context: Any, news: SimpleQueue[Any], show: Callable[[str], None], deadline: float) -> TrainingReport:
    """Pass on the news of rank 0 until both ranks have ended; the last one is the report."""
    report: TrainingReport | None = None
    ended = False
    while not ended:
        if time.monotonic() > deadline:
            raise CaptureError(f"the demo's training did not end within {LIMIT_S} s; try --skip-training")
        try:
            ended = context.join(timeout=0.2)
        except mp.ProcessRaisedException as error:
            raise CaptureError(f"rank {error.error_index} of the demo's training: {_last_line(error)}") from error
        except mp.ProcessExitedException as error:
            raise CaptureError(f"rank {error.error_index} of the demo's training died: {_last_line(error)}") from error
        while not news.empty():
            message = news.get()
            if isinstance(message, TrainingReport):
                report = message
            else:
                show(message)
    if report is None:
        raise CaptureError("the demo's training ended without a result")
    return report


def _last_line(error: Exception) -> str:
    """The error itself, behind the traceback that came with it from another process."""
    return str(error).strip().splitlines()[-1]


def _rank(rank: int, folder: str, news: SimpleQueue[Any]) -> None:
    """What each process runs; rank 0 reports."""
    _silence()
    torch.set_num_threads(1)
    tell = news.put if rank == 0 else _nobody
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S)
    )
    try:
        eager = _train(None, rank, lambda step: tell(f"training, eager FSDP2: step {step} of {STEPS}"))
        overlap = _train("overlap_eager", rank, lambda step: tell(f"training, backend overlap: step {step} of {STEPS}"))
        differing, compared = _compare(eager, overlap)
        tell(TrainingReport(eager.losses, overlap.losses, compared, differing))
    finally:
        dist.destroy_process_group()


def _silence() -> None:
    """Gloo greets on stdout, where only the results belong; errors travel to the parent as exceptions."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _nobody(message: object) -> None:
    """Where the news of all ranks but the first go."""


def _train(backend: str | None, rank: int, before_step: Callable[[int], None]) -> _Run:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = shard(Llama(PRESETS["tiny"]), mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if backend is not None:
        model = torch.compile(model, backend=backend, fullgraph=True)
    data = torch.Generator().manual_seed(1000 + rank)
    tokens = torch.randint(PRESETS["tiny"].vocab_size, (BATCH, TOKENS + 1), generator=data)
    losses, gradients = [], []
    for step in range(1, STEPS + 1):
        before_step(step)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: _shard_of(weight.grad) for name, weight in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    if backend is not None and not is_traceable(model):
        raise CaptureError("the model was compiled without its collectives, so equal numbers would prove nothing")
    return _Run(tuple(losses), tuple(gradients))


def _shard_of(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local().clone()
    return local


def _compare(eager: _Run, overlap: _Run) -> tuple[tuple[str, ...], int]:
    """Names that differ on any rank, and how many gradient shards all ranks compared."""
    differing = set()
    for before, after in zip(eager.gradients, overlap.gradients, strict=True):
        # A compiled model prefixes its names; the order of the parameters is the model's in both.
        pairs = zip(before.items(), after.values(), strict=True)
        differing |= {name for (name, mine), theirs in pairs if not torch.equal(mine, theirs)}
    everywhere: list[Any] = [None] * RANKS
    dist.all_gather_object(everywhere, (sorted(differing), sum(map(len, eager.gradients))))
    return tuple(sorted({name for names, _ in everywhere for name in names})), sum(count for _, count in everywhere)
