"""Twenty random models, each with the bits of eager FSDP2; three under Inductor in both orders.

``python -m tests.bench.fuzz`` tries as many as you like; a seed that failed there is added here.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.bench.fuzz import against_fsdp2, against_inductor, dropout_as_traced, judged
from tests.bench.random_models import SPICES, draw
from tests.cpu.ranks import Outcome, run_cases

SEEDS = tuple(range(20))
UNDER_INDUCTOR = {2: 1, 13: 1, 17: 3}
"""Seed → blocks. In 17 the memory of a gradient went to the next kernel while the gradient was being sent."""
BLOCKS = 2
TRACED = 12
"""A model with dropout of bfloat16 values: its gradients have the bits of the dropout that torch traces, see the script."""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    eager = {f"eager {seed}": partial(against_fsdp2, seed, BLOCKS) for seed in SEEDS}
    inductor = {f"inductor {seed}": partial(against_inductor, seed, blocks) for seed, blocks in UNDER_INDUCTOR.items()}
    return run_cases({**eager, **inductor}, ranks=2, limit_s=900)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_has_the_bits_of_eager_fsdp2(seed: int, outcomes: dict[str, Outcome]) -> None:
    found = judged(outcomes[f"eager {seed}"])
    assert found.verdict == ("traced" if seed == TRACED else "same"), f"{draw(seed, BLOCKS)}: {found.detail}"


def gradient_of_dropout(backend: str | None, *, as_traced: bool = False) -> Tensor:
    """Of 64 values in bfloat16, by torch alone."""
    x = torch.linspace(1, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    call = dropped if backend is None else torch.compile(dropped, backend=backend, fullgraph=True)
    torch.manual_seed(0)
    with dropout_as_traced() if as_traced else nullcontext():
        call(x).float().pow(2).sum().backward()
    assert x.grad is not None
    return x.grad


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.3)


def test_torch_traces_another_gradient_of_dropout_than_it_computes_eagerly_without_us() -> None:
    """What ``traced`` stands for: plain torch, one process, no collective."""
    torch._dynamo.reset()
    traced = gradient_of_dropout("aot_eager")
    assert torch.equal(traced, gradient_of_dropout(None, as_traced=True))
    assert not torch.equal(traced, gradient_of_dropout(None))


@pytest.mark.parametrize("seed", UNDER_INDUCTOR)
def test_moving_launches_changes_no_bit_of_what_inductor_computes(seed: int, outcomes: dict[str, Outcome]) -> None:
    assert judged(outcomes[f"inductor {seed}"]).verdict == "same", draw(seed, UNDER_INDUCTOR[seed])


def test_launches_did_move(outcomes: dict[str, Outcome]) -> None:
    moved = [outcomes[f"eager {seed}"].values()[0].moved for seed in SEEDS]
    assert sum(count > 0 for count in moved) >= len(SEEDS) // 2


def test_the_models_have_all_of_what_is_to_be_tried() -> None:
    drawn = [draw(seed, BLOCKS) for seed in SEEDS]
    assert {one.meshes for one in drawn} == {"one", "two", "replicas", "shards"}
    assert len({one.policy for one in drawn}) == 4
    for trait in ("tied", "checkpointed", "frozen", "elsewhere"):
        assert any(getattr(one, trait) for one in drawn), trait
    assert any(len(one.order) > one.blocks for one in drawn), "a block that is called twice"
    assert len(SPICES) == 10
