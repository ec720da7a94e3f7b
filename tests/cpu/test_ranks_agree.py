"""Ranks plan alone and launch alike: other batches on other ranks, one rank that compiles again, and the roll call.

Real collectives on two gloo ranks. A difference in the order of launches is an error of gloo's or a hang there, so that a
case that ends has shown that there is none; its numbers are those of eager FSDP2 besides.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from compile_backends.roll_call import LIMIT, SWITCH
from overlap_pass.errors import RanksDiffer
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.test_backend_numerics import SLOW, Stack, no_compile_cache, stack, watched_plans
from tests.cpu.training import Recipe, adamw, differences, train

ROWS = {"small and large": ((2, 2), (4096, 4096)), "one rank compiles again": ((3, 3, 3), (3, 4096, 3))}
"""Rows of the batch of each step, on each rank."""


def rows_of(case: str, model: nn.Module, number: int) -> tuple[Any, ...]:
    rows = ROWS[case][dist.get_rank()][number]
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return (torch.randn(rows, Stack.width, generator=generator),)


def against_fsdp2(case: str, **options: Any) -> tuple[list[str], list[str]]:
    """Differences to eager FSDP2, and the hash of each graph's launches."""
    recipe = Recipe(partial(rows_of, case), steps=len(ROWS[case][0]))
    reference = stack(blocks=3)
    expected = train(reference, adamw(reference), recipe)
    model = stack(blocks=3)
    optimizer = adamw(model)
    call = torch.compile(model, backend="overlap_eager", dynamic=False, options={"hardware": SLOW, **options})
    with watched_plans() as plans:
        found = train(model, optimizer, recipe, call=call)
    return differences(expected, found), [plan.launches for plan in plans]


@contextmanager
def debugging(limit_s: str = "60") -> Iterator[None]:
    with mock.patch.dict(os.environ, {SWITCH: "1", LIMIT: limit_s}):
        yield


def compared() -> tuple[list[str], list[str]]:
    with debugging():
        return against_fsdp2("one rank compiles again")


def in_different_orders(backend: str) -> str:
    """What the rank says that is planned by another strategy than the other one."""
    strategy = ("as_written", "backward_pre{depth=2}")[dist.get_rank()]
    options = {"strategy": strategy, "memory_budget": "unlimited", "coalesce": "off"}
    model = fully_shard_each(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    with debugging(), no_compile_cache(), pytest.raises(RanksDiffer) as caught:
        torch.compile(model, backend=backend, options=options)(torch.ones(2, 4)).sum().backward()
    return str(caught.value)


def inductor_in_one_order() -> int:
    model = fully_shard_each(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    call = torch.compile(model, backend="overlap")
    with debugging(), watched_plans() as plans:
        for _ in range(2):
            call(torch.ones(2, 4)).sum().backward()
    return len(plans)


def one_rank_is_missing() -> str:
    """Rank 1 does not run the graph at all; a group of its own, as later runs would be counted apart."""
    model = fully_shard_each(nn.Sequential(nn.Linear(4, 4)))
    if dist.get_rank() == 1:
        return ""
    with debugging("0.2"), pytest.raises(RanksDiffer) as caught:
        torch.compile(model, backend="overlap_eager")(torch.ones(2, 4))
    return str(caught.value)


def a_graph_that_raises(backend: str) -> str:
    """What an error in the middle of a graph says besides: the second of two layers looks up a row that is not there."""
    model = fully_shard_each(nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), NoSuchRow(), nn.Linear(4, 4)))
    with debugging(), no_compile_cache(), pytest.raises((IndexError, RuntimeError)) as caught:
        torch.compile(model, backend=backend, options={"coalesce": "off"})(torch.zeros(2, dtype=torch.int64))
    return "\n".join(caught.value.__notes__)


class NoSuchRow(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, (rows[:, 0] * 0 + 9).long())


def fully_shard_each(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


CASES: dict[str, Callable[[], Any]] = {
    **{case: partial(against_fsdp2, case) for case in ROWS},
    "small and large, no byte more": partial(against_fsdp2, "small and large", memory_budget="+0B"),
    "compared": compared,
    "different, eager": partial(in_different_orders, "overlap_eager"),
    "different, inductor": partial(in_different_orders, "overlap"),
    "the same, inductor": inductor_in_one_order,
    "raises, eager": partial(a_graph_that_raises, "overlap_eager"),
    "raises, inductor": partial(a_graph_that_raises, "overlap"),
    "missing": one_rank_is_missing,
}
TRAINED = [name for name in CASES if name.partition(",")[0] in (*ROWS, "compared")]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(CASES, ranks=2, limit_s=400)


@pytest.mark.parametrize("case", TRAINED)
def test_ranks_whose_batches_differ_train_as_fsdp2_does(case: str, outcomes: dict[str, Outcome]) -> None:
    for wrong, _ in outcomes[case].values():
        assert wrong == []


@pytest.mark.parametrize("case", TRAINED)
def test_their_graphs_launch_in_one_order(case: str, outcomes: dict[str, Outcome]) -> None:
    first, second = (set(hashes) for _, hashes in outcomes[case].values())
    assert first == second
    assert len(first) == 2, "one order for all forwards, one for all backwards"


def test_one_rank_did_compile_again(outcomes: dict[str, Outcome]) -> None:
    first, second = (len(hashes) for _, hashes in outcomes["one rank compiles again"].values())
    assert (first, second) == (2, 4)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_orders_that_differ_are_an_error_that_shows_both(lowering: str, outcomes: dict[str, Outcome]) -> None:
    for rank, message in enumerate(outcomes[f"different, {lowering}"].values()):
        assert f"ranks {rank} and {1 - rank} are about to launch in different orders" in message
        assert "first difference at launch" in message
        assert message.count("all_gather on g0 (2 ranks)") >= 4
        assert message.index(f"  rank {rank}\n") < message.index(f"  rank {1 - rank}\n")


def test_one_order_passes_under_inductor(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["the same, inductor"].values() == (2, 2)


def test_a_rank_that_does_not_come_is_named(outcomes: dict[str, Outcome]) -> None:
    message, _ = outcomes["missing"].values()
    assert "rank 0 has waited 0.2 s for rank 1" in message
    assert "Not there yet: 1 of 2 ranks" in message


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_graph_that_raises_says_how_far_it_came(lowering: str, outcomes: dict[str, Outcome]) -> None:
    for note in outcomes[f"raises, {lowering}"].values():
        assert "graph 'forward': launched 5 of 5, last #5 (all_gather on g0 (2 ranks): 16 B float32, 3.bias)" in note
        assert note.endswith("3 waits passed, last for #3 (all_gather on g0 (2 ranks): 16 B float32, 1.bias)")
