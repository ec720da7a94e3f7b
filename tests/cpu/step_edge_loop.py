"""A training loop with and without a ``StepEdge``, on a model that begins with an embedding, for the tests of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from overlap_pass.fsdp.edge import StepEdge
from overlap_pass.transport import ahead

__all__ = ["BF16", "LAUNCHES", "ROOMY", "Loop", "adamw", "local", "looking_up", "loss_of", "taken"]

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROOMY = {"memory_budget": "unlimited", "coalesce": "off"}
LAUNCHES = 3
"""That are ahead: of the embedding, which hides nothing, and of weight and bias of the layer behind it."""
Between = Callable[[nn.Module, Optimizer, int], None]


def looking_up(policy: MixedPrecisionPolicy = BF16) -> nn.Module:
    """Sizes that two ranks do not divide; the last layer has no row on the second rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    for part in model:
        if next(part.parameters(), None) is not None:
            fully_shard(part, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def adamw(model: nn.Module) -> Optimizer:
    """Biases are not decayed, as is usual: two groups."""
    biases = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": rest}], lr=1e-2, weight_decay=0.1)


def nothing(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Between a step and the next forward."""


@dataclass(frozen=True)
class Loop:
    """A training loop, and what is done in it beside training."""

    optimizer: Callable[[nn.Module], Optimizer] = adamw
    steps: int = 4
    micro_batches: int = 1
    clip: float | None = None
    evaluate: bool = False
    whole: bool = False
    between: Between = nothing

    def run(self, call: nn.Module, *, edge: bool) -> tuple[list[Tensor], int]:
        """Losses and parameters at the end, and how many gathers were taken that were under way."""
        optimizer = self.optimizer(call)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        across = StepEdge(call, optimizer) if edge else None
        found: list[Tensor] = []
        with taken() as count:
            for step in range(self.steps):
                if across is not None and self.whole:
                    loss = loss_of(call, step)
                    across.step(loss)
                    found.append(loss.detach())
                else:
                    found += self._backwards(call, step)
                    (optimizer if across is None else across).step()
                schedule.step()
                optimizer.zero_grad()
                self.between(call, optimizer, step)
        if across is not None:
            across.close()
        return found + [local(parameter).clone() for parameter in call.parameters()], len(count)

    def _backwards(self, call: nn.Module, step: int) -> Iterator[Tensor]:
        if self.evaluate:
            call.eval()
            with torch.no_grad():
                yield loss_of(call, 100 + step)
            call.train()
        for part in range(self.micro_batches):
            loss = loss_of(call, step * self.micro_batches + part)
            loss.backward()
            yield loss.detach()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(call.parameters(), self.clip)


def loss_of(call: nn.Module, number: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return call(torch.randint(7, (rows,), generator=generator)).float().pow(2).mean()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


@contextmanager
def taken() -> Iterator[list[ahead.UnderWay]]:
    found: list[ahead.UnderWay] = []
    original = ahead.UnderWay.check

    def check(way: ahead.UnderWay) -> None:
        original(way)
        found.append(way)

    ahead.UnderWay.check = check  # type: ignore[method-assign]
    try:
        yield found
    finally:
        ahead.UnderWay.check = original  # type: ignore[method-assign]
