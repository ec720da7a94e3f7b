"""Gathers across the step's edge: every bit of a loop with ``optimizer.step()``, and nothing stale, whatever is done in between.

Two gloo ranks train the same model twice through the same backend, once with ``optimizer.step()`` and once with
``StepEdge.step()``. How many gathers were taken is counted where they are checked.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import overlap_pass
from overlap_pass.errors import OptionError, TransportError
from overlap_pass.fsdp.edge import SEPARABLE, StepEdge
from overlap_pass.transport import ahead
from tests.cpu.models import TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import Outcome, fake_ranks, run_cases
from tests.cpu.test_backend_numerics import watched_plans

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SMALL = TinyLlamaConfig(blocks=1)
Between = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Between a step and the next forward."""


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Norms and biases are not decayed, as is usual: two groups."""
    plain = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() > 1]
    return torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": rest}], lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Loop:
    """A training loop, and what is done in it beside training."""

    backend: str = "overlap_eager"
    policy: MixedPrecisionPolicy = BF16
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    steps: int = 4
    micro_batches: int = 1
    clip: float | None = None
    evaluate: bool = False
    between: Between = nothing
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, *, edge: bool) -> tuple[list[Tensor], int]:
        """Losses and parameters at the end, and how many gathers were taken that were under way."""
        torch._dynamo.reset()
        model = sharded_llama(SMALL, mp_policy=self.policy)
        optimizer = self.optimizer(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        call = torch.compile(model, backend=self.backend, fullgraph=True, options=self.options)
        across = StepEdge(call, optimizer) if edge else None
        found: list[Tensor] = []
        with taken() as count:
            for step in range(self.steps):
                found += self._step(call, model, step)
                (optimizer if across is None else across).step()
                schedule.step()
                optimizer.zero_grad()
                self.between(call, optimizer, step)
        if across is not None:
            across.close()
        return found + [local(p).clone() for p in model.parameters()], len(count)

    def _step(self, call: nn.Module, model: nn.Module, step: int) -> Iterator[Tensor]:
        if self.evaluate:
            model.eval()
            with torch.no_grad():
                yield loss_of(call, 100 + step)
            model.train()
        for part in range(self.micro_batches):
            loss = loss_of(call, step * self.micro_batches + part)
            loss.backward()
            yield loss.detach()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    def differing(self) -> tuple[int, int]:
        """How many results differ in a bit, and how many gathers were taken."""
        expected, _ = self.run(edge=False)
        found, count = self.run(edge=True)
        return sum(not torch.equal(*pair) for pair in zip(expected, found, strict=True)), count


def loss_of(call: nn.Module, number: int) -> Tensor:
    return call(tokens(SMALL, seed=100 * number + dist.get_rank())).float().pow(2).mean()


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


# -- what is done between a step and the next forward


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def first_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        model.embedding.weight.detach().mul_(0.5)


def local_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.embedding.weight.to_local().detach().mul_(0.5)


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def assigned(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Parameters that hold other memory; the optimizer goes on with the old ones, as without an edge."""
    if step == 2:
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def stepped_again(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def other_shapes(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A batch of another shape: other graphs, that run before the next training step."""
    model(tokens(SMALL, seed=step, length=4)).float().sum().backward()
    optimizer.zero_grad()


def with_all_kinds(name: str, foreach: bool) -> tuple[int, int]:
    kind = getattr(torch.optim, name)
    return Loop(optimizer=lambda model: kind(model.parameters(), lr=1e-2, foreach=foreach), steps=3).differing()


def everything() -> tuple[int, int]:
    return Loop(steps=5, micro_batches=2, clip=1e-2, evaluate=True).differing()


def after_writes(way: str) -> tuple[str, int]:
    """Writes that change no version: refused where the gather is taken, or dropped before and right."""
    torch._dynamo.reset()
    model = sharded_llama(SMALL, mp_policy=BF16)
    optimizer = adamw(model)
    call = torch.compile(model, backend="overlap_eager", fullgraph=True)
    edge = StepEdge(model, optimizer)
    loss_of(call, 0).backward()
    edge.step()
    held = edge.under_way_bytes
    if way == "data":
        model.embedding.weight.data.mul_(0.5)
    else:
        with torch.no_grad():
            torch._foreach_mul_([model.embedding.weight], 0.5)
    try:
        loss_of(call, 1)
    except TransportError as error:
        message = str(error)
    else:
        message = "nothing was raised"
    edge.close()
    return message, held


def dropped_after_writes() -> tuple[int, int]:
    edges: list[StepEdge] = []
    original = StepEdge.step

    def step(edge: StepEdge) -> None:
        original(edge)
        edges[:] = [edge]

    def write(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        model.embedding.weight.data.mul_(0.5)
        for edge in edges:
            edge.drop()

    StepEdge.step = step  # type: ignore[method-assign]
    try:
        return Loop(between=write).differing()
    finally:
        StepEdge.step = original  # type: ignore[method-assign]


def two_models() -> int:
    """Two models of the same names and shapes, each with an edge: neither takes the other's."""
    losses = []
    for with_edge in (False, True):
        torch._dynamo.reset()
        models = [sharded_llama(SMALL, mp_policy=BF16) for _ in range(2)]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.mul_(1.5)
        optimizers = [adamw(model) for model in models]
        calls = [torch.compile(model, backend="overlap_eager", fullgraph=True) for model in models]
        edges = [StepEdge(*pair) for pair in zip(models, optimizers, strict=True)] if with_edge else optimizers
        for step in range(3):
            for call in calls:
                loss = loss_of(call, step)
                loss.backward()
                losses.append(loss.detach())
            for edge, optimizer in zip(edges, optimizers, strict=True):
                edge.step()
                optimizer.zero_grad()
    half = len(losses) // 2
    return sum(not torch.equal(*pair) for pair in zip(losses[:half], losses[half:], strict=True))


def forgotten() -> tuple[int, int]:
    """Bytes held behind a step, and when the edge is gone."""
    torch._dynamo.reset()
    model = sharded_llama(SMALL, mp_policy=BF16)
    optimizer = adamw(model)
    edge = StepEdge(model, optimizer)
    loss_of(torch.compile(model, backend="overlap_eager", fullgraph=True), 0).backward()
    edge.step()
    held, owner = edge.under_way_bytes, id(edge)
    del edge
    gc.collect()
    return held, ahead.under_way_bytes(owner)


def warm_cache() -> tuple[tuple[int, int], list[int], int]:
    """Cold without an edge, cold and warm with one; graphs that were planned, gathers that were taken when warm."""
    planned, loop = [], Loop(backend="overlap", policy=MixedPrecisionPolicy(), steps=3)
    with watched_plans() as plans:
        expected, _ = loop.run(edge=False)
        planned.append(len(plans))
        found, cold = loop.run(edge=True)
        planned.append(len(plans))
        again, warm = loop.run(edge=True)
        planned.append(len(plans))
    wrong = [sum(not torch.equal(*pair) for pair in zip(expected, other, strict=True)) for other in (found, again)]
    return (wrong[0], wrong[1]), planned, warm if cold else 0


CASES: dict[str, Callable[[], Any]] = {
    "everything at once": everything,
    "nothing": Loop().differing,
    **{
        between.__name__: Loop(between=between).differing
        for between in (scaled, first_scaled, local_scaled, loaded, assigned, stepped_again, other_shapes)
    },
    "dropped": dropped_after_writes,
    "two models": two_models,
    "forgotten": forgotten,
    **{
        f"{kind.__name__}, {foreach}": partial(with_all_kinds, kind.__name__, foreach)
        for kind in SEPARABLE
        for foreach in (False, True)
    },
    "warm": warm_cache,
    # What raises in the middle of a step leaves collectives behind, alike on all ranks: last.
    "data": partial(after_writes, "data"),
    "foreach": partial(after_writes, "foreach"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    with fresh_cache():
        return run_cases(CASES, ranks=2)


@pytest.mark.parametrize("case", ["everything at once", "nothing"])
def test_a_loop_has_the_same_bits_and_takes_what_was_under_way(outcomes, case) -> None:
    for differing, count in outcomes[case].values():
        assert differing == 0
        assert count > 0


@pytest.mark.parametrize("case", ["first_scaled", "local_scaled", "other_shapes"])
def test_one_parameter_that_is_written_between_steps_is_gathered_again_and_the_others_are_not(outcomes, case) -> None:
    for differing, count in outcomes[case].values():
        assert differing == 0
        assert count > 0


@pytest.mark.parametrize("case", ["scaled", "loaded", "stepped_again", "dropped"])
def test_nothing_is_taken_where_all_parameters_were_written_between_steps(outcomes, case) -> None:
    assert outcomes[case].values() == ((0, 0), (0, 0))


def test_parameters_that_were_replaced_are_gathered_as_they_are(outcomes) -> None:
    assert [differing for differing, _ in outcomes["assigned"].values()] == [0, 0]


@pytest.mark.parametrize("case", ["data", "foreach"])
def test_a_write_that_changes_no_version_is_an_error_and_no_wrong_number(outcomes, case) -> None:
    for message, held in outcomes[case].values():
        assert "call drop() of the StepEdge behind such a write" in message
        assert held > 0


def test_neither_of_two_models_takes_what_was_gathered_for_the_other(outcomes) -> None:
    assert outcomes["two models"].values() == (0, 0)


def test_what_nobody_takes_goes_with_its_edge(outcomes) -> None:
    for held, left in outcomes["forgotten"].values():
        assert held > 0
        assert left == 0


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", SEPARABLE)
def test_each_optimizer_in_two_parts_gives_the_bits_of_one_step(outcomes, kind, foreach) -> None:
    for differing, count in outcomes[f"{kind.__name__}, {foreach}"].values():
        assert differing == 0
        assert count > 0


def test_inductor_has_the_same_bits_and_graphs_out_of_a_cache_take_as_well(outcomes) -> None:
    for wrong, planned, count in outcomes["warm"].values():
        assert wrong == (0, 0)
        assert planned == [2, 4, 4], "the choice is in the key, and what was cached is found again"
        assert count > 0
