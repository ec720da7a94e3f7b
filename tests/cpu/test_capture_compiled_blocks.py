"""Blocks that are wrapped by ``torch.compile`` before or after ``fully_shard``, converted with the model around them.

Two gloo ranks, against eager FSDP2, bit for bit: the model compiled as a whole in one graph, or run as it is, each block
through its own graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import overlap_pass
from overlap_pass.fsdp.module import OverlapModule
from tests.cpu.models import TinyLlama, TinyLlamaConfig, footprint
from tests.cpu.ranks import Outcome, fake_ranks, run_cases
from tests.cpu.test_fsdp_numerics import BF16
from tests.cpu.training import Recipe, Training, adamw, differences, train

BACKEND = "overlap_eager"
STEPS = Recipe(steps=2)

Prepare = Callable[[nn.ModuleList, int], None]


def compile_in_place(blocks: nn.ModuleList, number: int) -> None:
    blocks[number].compile(backend=BACKEND)


def wrap(blocks: nn.ModuleList, number: int) -> None:
    blocks[number] = torch.compile(blocks[number], backend=BACKEND)


def before(prepare: Prepare) -> nn.Module:
    return build(prepare, None)


def after(prepare: Prepare) -> nn.Module:
    return build(None, prepare)


def build(first: Prepare | None, last: Prepare | None) -> nn.Module:
    torch.manual_seed(0)
    model = TinyLlama(TinyLlamaConfig(blocks=2))
    for number in range(2):
        if first is not None:
            first(model.blocks, number)
        fully_shard(model.blocks[number], mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    for number in range(2):
        if last is not None:
            last(model.blocks, number)
    return model


def against_plain_blocks(make: Callable[[], nn.Module], whole: bool) -> list[str]:
    reference, model = build(None, None), make()
    expected = train(reference, adamw(reference), STEPS)
    optimizer = adamw(model)
    overlap_pass.make_traceable(model)
    call = torch.compile(model, backend=BACKEND, fullgraph=True) if whole else model
    return differences(expected, _without_wrappers(train(model, optimizer, STEPS, call=call)))


def _without_wrappers(training: Training) -> Training:
    def clean(tensors: dict) -> dict:
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}

    return Training(training.losses, tuple(map(clean, training.gradients)), clean(training.parameters))


WAYS = {
    "block.compile(), then fully_shard": partial(before, compile_in_place),
    "fully_shard, then block.compile()": partial(after, compile_in_place),
    "torch.compile(block), then fully_shard": partial(before, wrap),
    "fully_shard, then torch.compile(block)": partial(after, wrap),
}
RUNS = {
    f"{name}; {'one graph' if whole else 'a graph each'}": partial(against_plain_blocks, make, whole)
    for (name, make), whole in product(WAYS.items(), (True, False))
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[run].values() == ([], [])


def test_a_wrapper_is_no_unit_itself_and_everything_goes_back() -> None:
    with fake_ranks(2):
        model = before(wrap)
        model.blocks[0]._orig_mod.register_forward_pre_hook(lambda *_: None)
        at_first = footprint(model)
        overlap_pass.make_traceable(model)
        assert type(model.blocks[0]) is torch._dynamo.OptimizedModule
        assert isinstance(model.blocks[0]._orig_mod, OverlapModule)
        assert next(iter(model.blocks[0]._orig_mod._forward_pre_hooks)) in model.blocks[0]._forward_pre_hooks
        model.blocks[0].set_reshard_after_forward(False)
        assert "kept for backward" in repr(model.blocks[0])
        model.blocks[0].set_reshard_after_forward(True)
        overlap_pass.restore(model)
        assert footprint(model) == at_first
