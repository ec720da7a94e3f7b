"""restore() gives plain FSDP2 back, and checkpoints pass between a model and its converted self."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

import overlap_pass
from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import inspection
from tests.cpu.models import footprint, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_ranks(4, rank=1):
        yield


def test_restore_gives_every_class_hook_and_mark_back() -> None:
    model = sharded_llama()
    before = footprint(model)
    overlap_pass.make_traceable(model)
    assert footprint(model) != before
    assert overlap_pass.restore(model) is model
    assert footprint(model) == before
    assert not overlap_pass.is_traceable(model)


def test_restore_keeps_hooks_that_came_after_the_conversion() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    calls: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: calls.append("after"))
    overlap_pass.restore(model)
    model(tokens(model.config, seed=0))
    assert calls == ["after"]


def test_restore_of_a_plain_model_changes_nothing() -> None:
    model = sharded_llama()
    before = footprint(model)
    overlap_pass.restore(model)
    assert footprint(model) == before


def test_restore_keeps_a_reshard_flag_that_was_changed_meanwhile() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    model.blocks[0].set_reshard_after_forward(False)
    overlap_pass.restore(model)
    flags = [inspection_flag(model, name) for name in ("blocks.0", "blocks.1")]
    assert flags == [False, True]


def inspection_flag(model: nn.Module, fqn: str) -> bool:
    (unit,) = [unit for unit in inspection.inspect(model) if unit.fqn == fqn]
    return unit.reshard


def test_parts_converted_one_after_the_other_are_restored_together() -> None:
    model = sharded_llama()
    before = footprint(model)
    overlap_pass.make_traceable(model.blocks[0])
    overlap_pass.make_traceable(model)
    assert overlap_pass.is_traceable(model)
    overlap_pass.restore(model)
    assert footprint(model) == before


def test_a_model_whose_gradients_still_wait_is_not_restored() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    model.set_requires_gradient_sync(False)
    model(tokens(model.config, seed=0)).sum().backward()
    before = footprint(model)
    with pytest.raises(ConversionError, match="the root module holds gradients that are not reduced yet"):
        overlap_pass.restore(model)
    assert footprint(model) == before
    model.set_requires_gradient_sync(True)
    model(tokens(model.config, seed=0)).sum().backward()
    overlap_pass.restore(model)
