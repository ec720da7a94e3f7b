"""What make_traceable() refuses, and that a refusal or an accident leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import overlap_pass
from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import compat, convert
from overlap_pass.fsdp.discover import find_units
from tests.cpu.models import TinyLlama, footprint, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_ranks(4, rank=1):
        yield


def with_hook(model: TinyLlama) -> None:
    model.blocks[1].set_all_reduce_hook(lambda output: None)


def with_own_gather(model: TinyLlama) -> None:
    state = compat.live_state(model.blocks[1])
    model.blocks[1].set_custom_all_gather(type("Mine", (type(group_of(state)._all_gather_comm),), {})())


def group_of(state: Any) -> Any:
    return (
        getattr(state, "_fsdp_param_groups", None)[0]
        if hasattr(state, "_fsdp_param_groups")
        else state._fsdp_param_group
    )


def with_pending_gradients(model: TinyLlama) -> None:
    model.set_requires_gradient_sync(False)
    model(tokens(model.config, seed=0)).sum().backward()


def with_unshard_under_way(model: TinyLlama) -> None:
    model.blocks[1].unshard(async_op=True)


def with_float8(model: TinyLlama) -> None:
    model.blocks[1].attention.key.weight._local_tensor.fsdp_pre_all_gather = lambda *_: None


@pytest.mark.parametrize(
    ("options", "prepare", "message"),
    [
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, None, "embedding.weight: is offloaded to the CPU"),
        ({"reshard_after_forward": 2}, None, "the root module: reshard_after_forward is a number of ranks"),
        ({}, with_hook, "blocks.1: has an all-reduce hook"),
        ({}, with_own_gather, "blocks.1: has a custom all-gather"),
        ({}, with_pending_gradients, "holds gradients that are not reduced yet"),
        ({}, with_unshard_under_way, "blocks.1: has an unshard"),
        ({}, with_float8, "blocks.1.attention.key.weight: has an all-gather extension"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name_before_anything_is_touched(
    options: dict[str, Any], prepare: Callable[[TinyLlama], None] | None, message: str
) -> None:
    model = sharded_llama(**options)
    if prepare is not None:
        prepare(model)
    before = footprint(model)
    with pytest.raises(ConversionError) as refusal:
        overlap_pass.make_traceable(model)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert footprint(model) == before


def test_a_model_without_fully_shard_is_refused() -> None:
    with pytest.raises(ConversionError, match=r"no module of TinyLlama is under fully_shard\(\)"):
        overlap_pass.make_traceable(TinyLlama())


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ConversionError, match="not function"):
        overlap_pass.make_traceable(tokens)


def test_replicate_is_refused() -> None:
    model = replicate(TinyLlama(), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("r",)))
    with pytest.raises(ConversionError, match=r"is under replicate\(\), not sharded"):
        overlap_pass.make_traceable(model)


def test_one_rank_has_nothing_to_overlap() -> None:
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("pipeline", "data"))["data"]
    with pytest.raises(ConversionError, match=r"^nothing to overlap with 1 rank: run under torchrun"):
        overlap_pass.make_traceable(fully_shard(TinyLlama(), mesh=alone))


def test_a_model_in_the_middle_of_its_forward_is_refused() -> None:
    model = sharded_llama()
    refusals: list[str] = []

    def convert_now(*_: object) -> None:
        try:
            overlap_pass.make_traceable(model)
        except ConversionError as error:
            refusals.append(str(error))

    model.blocks[0].attention.register_forward_pre_hook(convert_now)
    model(tokens(model.config, seed=0))
    assert len(refusals) == 1
    assert "the root module: is in the middle of a forward or backward" in refusals[0]


def test_a_part_of_a_model_that_has_run_is_refused() -> None:
    model = sharded_llama()
    model(tokens(model.config, seed=0))
    with pytest.raises(ConversionError, match="is part of a larger FSDP2 model"):
        overlap_pass.make_traceable(model.blocks[0])


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_llama()
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(ConversionError, match=r"torch 2\.10\.1 is too old: overlap-pass needs 2\.11 or newer"):
        overlap_pass.make_traceable(model)


def test_a_torch_that_has_changed_inside_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_llama()
    monkeypatch.delattr(_fsdp_collectives, "DefaultAllGather")
    group_of(compat.live_state(model)).__dict__.pop("reduce_grads")
    with pytest.raises(ConversionError, match=r"no .*DefaultAllGather, FSDPParamGroup\.reduce_grads"):
        overlap_pass.make_traceable(model)


def test_this_torch_has_every_internal_that_is_used() -> None:
    states = [unit.state for unit in find_units(sharded_llama())]
    assert len(states) == 3
    assert compat.absent_internals(tuple(states)) == ()


# -- accidents


@pytest.mark.parametrize("succeeding", range(0, 12, 3))
def test_an_accident_in_the_middle_takes_everything_back(succeeding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_llama()
    model(tokens(model.config, seed=0))  # leaves the root's gathered parameters registered
    before = footprint(model)
    genuine, calls = convert.converted_class, []

    def fail_late(*args: Any, **kwargs: Any) -> type:
        calls.append(args)
        if len(calls) > succeeding:
            raise MemoryError("no more classes")
        return genuine(*args, **kwargs)

    monkeypatch.setattr(convert, "converted_class", fail_late)
    with pytest.raises(ConversionError, match=r"failed \(MemoryError: no more classes\); the model is as it was"):
        overlap_pass.make_traceable(model)
    assert footprint(model) == before


def test_an_interrupt_takes_everything_back_and_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharded_llama()
    before = footprint(model)

    def interrupt(*_: Any, **__: Any) -> type:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "converted_class", interrupt)
    with pytest.raises(KeyboardInterrupt):
        overlap_pass.make_traceable(model)
    assert footprint(model) == before
