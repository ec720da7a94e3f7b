"""Parameters, checkpoints and optimizers do not notice the conversion, nor the way back, on two gloo ranks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import overlap_pass
from tests.cpu.models import TinyLlama, TinyLlamaConfig, sharded_llama
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, Training, adamw, differences, token_batch, train

CONFIG = TinyLlamaConfig(blocks=1)
ONE, REST = Recipe(steps=1), Recipe(steps=2, first=1)


def llama() -> TinyLlama:
    return sharded_llama(CONFIG)


def converted() -> nn.Module:
    return overlap_pass.make_traceable(llama())


def uninterrupted() -> Training:
    """Three steps of eager FSDP2; what the last two of them computed."""
    model = llama()
    optimizer = adamw(model)
    train(model, optimizer, ONE)
    return train(model, optimizer, REST)


def checkpoint_passes(*, from_converted: bool) -> list[str]:
    """One step on one side, a distributed checkpoint, two steps on the other side."""
    writer, reader = (converted(), llama()) if from_converted else (llama(), converted())
    optimizer = adamw(writer)
    train(writer, optimizer, ONE)
    with one_folder() as folder:
        model_state, optimizer_state = get_state_dict(writer, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        with torch.no_grad():
            for parameter in reader.parameters():
                parameter.zero_()
        optimizer = adamw(reader)
        model_state, optimizer_state = get_state_dict(reader, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
        set_state_dict(reader, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return differences(uninterrupted(), train(reader, optimizer, REST))


@contextlib.contextmanager
def one_folder() -> Iterator[str]:
    """A folder that both ranks see."""
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        dist.broadcast_object_list(shared, src=0)
        yield shared[0]
        dist.barrier()


def there_and_back() -> list[str]:
    """FSDP2, converted, FSDP2, converted: a step each, with one optimizer."""
    reference, model = llama(), llama()
    expected = train(reference, adamw(reference), Recipe(steps=4))
    optimizer = adamw(model)
    turns = [lambda m: m, overlap_pass.make_traceable, overlap_pass.restore, overlap_pass.make_traceable]
    found = [train(turn(model), optimizer, Recipe(steps=1, first=step)) for step, turn in enumerate(turns)]
    losses = tuple(loss for part in found for loss in part.losses)
    gradients = tuple(step for part in found for step in part.gradients)
    return differences(expected, Training(losses, gradients, found[-1].parameters))


def assigned_state(*, then_restored: bool) -> list[str]:
    """A loaded state dict that replaces every parameter, uneven shards too."""
    source = llama()
    optimizer = adamw(source)
    train(source, optimizer, ONE)
    model = converted()
    model.load_state_dict({name: tensor.clone() for name, tensor in source.state_dict().items()}, assign=True)
    if then_restored:
        overlap_pass.restore(model)
    found = train(model, adamw(model), REST)
    return differences(train(source, adamw(source), REST), found)


def give_values(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        model.scale.fill_(1)


def from_meta(*, then_restored: bool) -> list[str]:
    """Converted while on meta device, then given storage and values."""
    models = []
    for convert in (lambda model: model, overlap_pass.make_traceable):
        with torch.device("meta"):
            model = TinyLlama(CONFIG)
        fully_shard(model.blocks[0])
        model = convert(fully_shard(model))
        model.to_empty(device="cpu")
        give_values(model)
        models.append(model)
    reference, model = models
    if then_restored:
        overlap_pass.restore(model)
    return differences(train(reference, adamw(reference), Recipe()), train(model, adamw(model), Recipe()))


def another_dtype() -> list[str]:
    """Converted, then ``to(bfloat16)``, against FSDP2 that was bfloat16 before its first forward."""
    reference, model = llama().to(torch.bfloat16), converted().to(torch.bfloat16)
    return differences(train(reference, adamw(reference), Recipe()), train(model, adamw(model), Recipe()))


def new_storage_then_restored() -> list[str]:
    """A model that has run gets other storage while it is converted; FSDP2 must not gather the old one afterwards."""
    models = [llama(), llama()]
    for model in models:
        with torch.no_grad():
            model(*token_batch(model, 9))
    overlap_pass.make_traceable(models[1])
    for model in models:
        give_values(model.to_empty(device="cpu"))
    overlap_pass.restore(models[1])
    expected, found = (train(model, adamw(model), Recipe()) for model in models)
    return differences(expected, found)


def a_full_state_dict() -> list[str]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    one, other = get_model_state_dict(llama(), options=options), get_model_state_dict(converted(), options=options)
    assert list(one) == list(other)
    return [name for name in one if not torch.equal(one[name], other[name])]


def names_of_a_compiled_model() -> list[str]:
    compiled = torch.compile(converted(), backend="eager")
    return sorted(set(get_model_state_dict(llama())) ^ set(get_model_state_dict(compiled)))


def a_second_optimizer_step_on_shards() -> list[str]:
    """What a converted model keeps between steps are shards, nothing gathered."""
    model = converted()
    train(model, adamw(model), ONE)
    return [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]


def evaluation() -> list[str]:
    """Without gradients, and in between of training steps."""
    reference, model = llama(), converted()
    (batch,) = token_batch(model, 7)
    with torch.no_grad():
        expected, found = reference.eval()(batch), model.eval()(batch)
    with torch.inference_mode():
        again = model(batch)
    return [] if torch.equal(expected, found) and torch.equal(found, again) else ["outputs differ"]


CASES = {
    "a checkpoint of FSDP2 is loaded by a converted model": partial(checkpoint_passes, from_converted=False),
    "a checkpoint of a converted model is loaded by FSDP2": partial(checkpoint_passes, from_converted=True),
    "there and back within one training": there_and_back,
    "load_state_dict(assign=True)": partial(assigned_state, then_restored=False),
    "load_state_dict(assign=True), then restored": partial(assigned_state, then_restored=True),
    "converted on meta device": partial(from_meta, then_restored=False),
    "converted on meta device, then restored": partial(from_meta, then_restored=True),
    "to(bfloat16) after the conversion": another_dtype,
    "to_empty() after the conversion, then restored": new_storage_then_restored,
    "the full state dict": a_full_state_dict,
    "names of a compiled model": names_of_a_compiled_model,
    "shards between steps": a_second_optimizer_step_on_shards,
    "evaluation": evaluation,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(CASES, ranks=2)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_lost(case: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[case].values() == ([], [])
