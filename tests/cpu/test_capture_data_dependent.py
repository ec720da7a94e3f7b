"""Parameters that are read as the data say, outside of graphs: no rank waits for another that does not come.

Two gloo ranks, which time out after a minute. Each visits the experts in another order, and in evaluation one of them none at
all. Under FSDP2 a hook gathers the whole unit before; so does the converted model where the unit runs uncompiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import overlap_pass
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, adamw, differences, float_batch, train

WIDTH = 5


class Experts(nn.Module):
    """As many experts as rows: each row's rank by its first column says when its expert is visited, and whether."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for number in x[:, 0].argsort().tolist():
            if x[number, 0] > -100:
                out = out + torch.tanh(self.experts[number](x))
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.experts, self.down = nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH)
        self.visit: Callable[[nn.Module, Tensor], Tensor] = nn.Module.__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.visit(self.experts, self.up(x)))


def sharded() -> Mixture:
    torch.manual_seed(0)
    model = Mixture()
    fully_shard(model.experts)
    return fully_shard(model)


def call_disabled(model: Mixture) -> Callable[..., Tensor]:
    model.visit = torch.compiler.disable(nn.Module.__call__)
    return torch.compile(model, backend="overlap_eager")


def forward_disabled(model: Mixture) -> Callable[..., Tensor]:
    model.experts.forward = torch.compiler.disable(model.experts.forward)
    return torch.compile(model, backend="overlap_eager")


def uncompiled(model: Mixture) -> Callable[..., Tensor]:
    return model


def trained_and_evaluated(run: Callable[[Mixture], Callable[..., Tensor]]) -> list[str]:
    recipe = Recipe(functools.partial(float_batch, WIDTH))
    reference, model = sharded(), sharded()
    expected = train(reference, adamw(reference), recipe)
    optimizer = adamw(model)
    call = run(overlap_pass.make_traceable(model))
    wrong = differences(expected, train(model, optimizer, recipe, call=call))
    # One rank visits nothing: what it multiplies with makes the first column fall below the bound.
    x = torch.ones(3, WIDTH)
    with torch.no_grad():
        for each in (reference, model):
            each.up.weight.zero_()
            each.up.bias.fill_(1.0)
            if dist.get_rank() == 1:
                each.up.bias.to_local().fill_(-1000.0)
        outputs = [reference(x), call(x)]
    return wrong + ([] if torch.equal(*outputs) else ["evaluation"])


def order_of_visits() -> list[int]:
    return float_batch(WIDTH, nn.Identity(), 0)[0][:, 0].argsort().tolist()


WAYS = {"uncompiled": uncompiled, "call disabled": call_disabled, "forward disabled": forward_disabled}
RUNS = {name: functools.partial(trained_and_evaluated, run) for name, run in WAYS.items()}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases({**RUNS, "orders": order_of_visits}, ranks=2)


@pytest.mark.parametrize("run", RUNS)
def test_no_rank_waits_for_ever_and_the_numbers_are_those_of_eager_fsdp2(
    run: str, outcomes: dict[str, Outcome]
) -> None:
    assert outcomes[run].values() == ([], [])


def test_the_ranks_do_go_different_ways(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["orders"].values()
    assert first != second
