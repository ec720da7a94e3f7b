"""What make_traceable() changes of a model and what stays.

In one process, with torch's fake process group of four ranks: nothing here computes with gathered values.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import overlap_pass
from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import inspection
from overlap_pass.fsdp.module import OverlapModule
from overlap_pass.fsdp.unit import Unit
from tests.cpu.models import TinyLlama, footprint, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_ranks(4, rank=1):
        yield


def test_the_same_object_comes_back_and_a_second_call_changes_nothing() -> None:
    model = sharded_llama()
    assert not overlap_pass.is_traceable(model)
    assert overlap_pass.make_traceable(model) is model
    assert overlap_pass.is_traceable(model)
    once = footprint(model)
    assert overlap_pass.make_traceable(model) is model
    assert footprint(model) == once


def test_parameters_and_their_names_stay() -> None:
    model = sharded_llama()
    parameters = dict(model.named_parameters())
    keys = list(model.state_dict())
    overlap_pass.make_traceable(model)
    converted = dict(model.named_parameters())
    assert list(converted) == list(parameters)
    assert all(converted[name] is parameters[name] for name in parameters)
    assert list(model.state_dict()) == keys
    assert model.blocks[0].attention.query.weight is parameters["blocks.0.attention.query.weight"]


def test_a_parameter_reads_as_its_shard_outside_forward_and_gathered_inside() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    seen = []
    model.blocks[0].feed_forward.gate.register_forward_pre_hook(lambda gate, args: seen.append(gate.weight))
    model(tokens(model.config, seed=0))
    outside = model.blocks[0].feed_forward.gate.weight
    assert isinstance(outside, DTensor)
    assert outside.to_local().shape == (24, 32)
    assert [type(read) for read in seen] == [torch.Tensor]
    assert seen[0].shape == (95, 32)


def test_classes_answer_as_before() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    assert isinstance(model, TinyLlama)
    assert isinstance(model.head, nn.Linear)
    assert type(model.head).__name__ == "Linear"
    assert isinstance(model.blocks[0], OverlapModule)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_modules_of_one_class_with_the_same_parameters_share_their_converted_class() -> None:
    one, other = overlap_pass.make_traceable(sharded_llama()), overlap_pass.make_traceable(sharded_llama())
    assert type(one.blocks[0]) is type(one.blocks[1]) is type(other.blocks[0])
    assert type(one.head) is type(other.blocks[0].attention.key)
    assert type(one.head) is not type(one.blocks[0].attention.query), "with and without a bias"


def test_the_users_hooks_keep_their_order_around_the_units() -> None:
    model = sharded_llama()
    calls: list[str] = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda *_: calls.append("before, first"), prepend=True)
    block.register_forward_pre_hook(lambda *_: calls.append("before, last"))
    block.register_forward_hook(lambda *_: calls.append("after"))
    order = [list(block._forward_pre_hooks), list(block._forward_hooks)]
    overlap_pass.make_traceable(model)
    assert [list(block._forward_pre_hooks), list(block._forward_hooks)] == order
    model(tokens(model.config, seed=0))
    assert calls == ["before, first", "before, last", "after"]


def test_the_representation_says_what_was_converted() -> None:
    model = overlap_pass.make_traceable(sharded_llama(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)))
    text = repr(model)
    # By hand, per block: 32+32 norms, 32*32+32 query, 2*16*32 key and value, 32*32 out, 3*95*32 feed-forward, 2 bytes each.
    size = (2 * 32 + 32 * 32 + 32 + 2 * 16 * 32 + 32 * 32 + 3 * 95 * 32) * 2 / 1024
    group = dist.group.WORLD.group_name
    assert (
        f"overlap_pass: 10 parameters, {size:.1f} KiB gathered as bfloat16 over 4 ranks (group {group}), gradients "
        "reduced as float32; gathered again in backward; inputs cast to bfloat16\n"
    ) in text
    assert "overlap_pass: 3 parameters, " in text
    assert "kept for backward" in text


def test_the_representation_follows_a_change_of_dtype() -> None:
    model = overlap_pass.make_traceable(sharded_llama()).to(torch.bfloat16)
    assert re.search("gathered as bfloat16 over 4 ranks .*, gradients reduced as bfloat16", repr(model.blocks[0]))


def test_an_exception_in_forward_does_not_leave_parameters_gathered() -> None:
    model = overlap_pass.make_traceable(sharded_llama())

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].feed_forward.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(tokens(model.config, seed=0))
    handle.remove()
    assert isinstance(model.head.weight, DTensor)
    assert isinstance(model.blocks[1].attention.query.weight, DTensor)


def test_methods_registered_as_forwards_still_gather() -> None:
    model = sharded_llama()
    model.encode = lambda ids: model.embedding(ids)
    register_fsdp_forward_method(model, "encode")
    overlap_pass.make_traceable(model)
    assert model.encode(tokens(model.config, seed=0)).shape == (2, 8, 32)


def test_a_deleted_parameter_is_an_attribute_error() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    del model.head.weight
    assert not hasattr(model.head, "weight")
    model.head.register_parameter("weight", None)
    assert model.head.weight is None


def test_a_model_on_meta_device_is_converted_before_it_has_storage() -> None:
    with torch.device("meta"):
        model = TinyLlama()
    model = overlap_pass.make_traceable(fully_shard(model))
    model.to_empty(device="cpu")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert model(tokens(model.config, seed=0)).shape == (2, 8, 67)


# -- FSDP2's methods


def test_every_public_method_of_fsdp2_is_there() -> None:
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    assert public - set(dir(OverlapModule)) == set()


def flags(model: nn.Module) -> list[tuple[bool, bool]]:
    """Of the root and two blocks: whether backward reduces, and over replicas."""
    units = [module._get_fsdp_state() for module in (model, *model.blocks)]
    if not isinstance(units[0], Unit):
        specs = [inspection.inspect(model)[number].reduction for number in range(3)]
        return [(spec["reduces"], spec["all_reduces"]) for spec in specs]
    return [(unit.reduces, unit.all_reduces) for unit in units]


def test_which_backwards_reduce_is_told_as_to_fsdp2_and_passes_there_and_back() -> None:
    model = sharded_llama()
    model.set_requires_gradient_sync(False)
    model.blocks[0].set_requires_gradient_sync(True)
    model.blocks[1].set_requires_all_reduce(True)
    before = [(False, False), (True, True), (False, True)]
    assert flags(model) == before
    assert flags(overlap_pass.make_traceable(model)) == before
    model.set_requires_gradient_sync(True, recurse=False)
    model.blocks[0].set_requires_all_reduce(False)
    after = [(True, True), (True, False), (False, True)]
    assert flags(model) == after
    assert flags(overlap_pass.restore(model)) == after


def test_gradients_that_wait_take_no_memory_before_and_are_forgotten_with_the_iteration() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    model.set_requires_gradient_sync(False)
    unit = model._get_fsdp_state()
    leaves = [leaf for _, _, read in unit.owned for leaf in read.accumulator.leaves.values()]
    assert [leaf.untyped_storage().nbytes() for leaf in leaves] == [4, 4, 4]
    model(tokens(model.config, seed=0)).sum().backward()
    sums = [read.accumulator.sums["gradient"].shape for _, _, read in unit.owned]
    assert sums == [(67, 32), (32,), (67, 32)]
    assert model.head.weight.grad is None
    assert unit.pending
    model.reset_iter_state()
    assert not unit.pending


def test_a_change_of_dtype_between_micro_batches_is_told() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    model.set_requires_gradient_sync(False)
    model.to(torch.bfloat16)
    with pytest.raises(ConversionError, match=r"held back in torch\.float32 but come in torch\.bfloat16"):
        model(tokens(model.config, seed=0))
    model.reset_iter_state()
    model.set_requires_gradient_sync(False)
    model(tokens(model.config, seed=0)).sum().backward()


def test_the_root_moves_its_inputs_to_its_device_as_fsdp2_does() -> None:
    unit = Unit("", reshard=True, input_dtype=torch.bfloat16, output_dtype=None, device=torch.device("meta"))
    args, kwargs = unit.pre_forward(nn.Identity(), (torch.ones(2), 3), {"mask": torch.ones(2, dtype=torch.bool)})
    assert [args[0].device.type, args[0].dtype, args[1]] == ["meta", torch.bfloat16, 3]
    assert [kwargs["mask"].device.type, kwargs["mask"].dtype] == ["meta", torch.bool]


def test_what_runs_by_itself_now_does_nothing() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    before = footprint(model)
    model.unshard()
    model.unshard(async_op=True).wait()
    model.reshard()
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_modules_to_forward_prefetch([model.blocks[0]])
    model.set_modules_to_backward_prefetch([model.blocks[0]])
    assert footprint(model) == before


def test_what_comes_too_late_says_how_to_do_it() -> None:
    model = overlap_pass.make_traceable(sharded_llama())
    with pytest.raises(ConversionError, match=r"blocks\.0 comes too late: call overlap_pass\.restore"):
        model.blocks[0].set_gradient_divide_factor(2.0)


def test_a_copy_is_refused_as_under_fsdp2() -> None:
    with pytest.raises(ConversionError, match="state_dict"):
        copy.deepcopy(overlap_pass.make_traceable(sharded_llama()))


# -- names and flags


def test_units_and_parameters_have_the_names_that_checkpoints_have() -> None:
    torch.manual_seed(0)
    model = TinyLlama()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    fully_shard(model.blocks[0])
    fully_shard([model.norm, model.head])
    fully_shard(model)
    specs = inspection.inspect(model)
    assert {spec.fqn for spec in specs} == {"", "blocks.0", "norm, head"}
    assert "blocks.0.attention.query.weight" in {p.gather.parameter for spec in specs for p in spec.parameters}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"": False, "blocks.0": True}),
        (True, {"": True, "blocks.0": True}),
        (False, {"": False, "blocks.0": False}),
    ],
)
def test_the_root_keeps_its_parameters_unless_it_is_told_otherwise(
    given: bool | None, expected: dict[str, bool]
) -> None:
    flags = {unit.fqn: unit.reshard for unit in inspection.inspect(sharded_llama(reshard_after_forward=given))}
    assert {name: flags[name] for name in expected} == expected


def test_ranks_pad_together_or_not_at_all() -> None:
    specs = {p.gather.parameter: p.gather for unit in inspection.inspect(sharded_llama()) for p in unit.parameters}
    uneven, even = specs["blocks.0.feed_forward.gate.weight"], specs["blocks.0.attention.query.weight"]
    assert (uneven.padded, uneven.padded_rows, uneven.shape) == (True, 24, (95, 32))
    assert (even.padded, even.padded_rows) == (False, 8)
