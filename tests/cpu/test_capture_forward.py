"""What forward sees when it walks over its parameters; ``overlap_pass.shard``; gathers under activation checkpointing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import overlap_pass
from overlap_pass.errors import ConversionError
from overlap_pass.fsdp.gather import ANNOTATION, drop_unused_gathers, gather
from overlap_pass.rewrite.partition import partition
from tests.cpu.models import TinyLlama, footprint
from tests.cpu.ranks import fake_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 6


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(4):
        yield


# -- parameters() inside forward


class Body(nn.Module):
    """Has no parameter of its own, and computes in the dtype of those below it, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    def forward(self, x: Tensor) -> Tensor:
        x = x.float().to(self.dtype)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def sharded() -> nn.Module:
    return fully_shard(Model(), mp_policy=BF16)


def test_the_dtype_of_parameters_inside_forward_is_the_one_to_compute_with() -> None:
    # Without that answer, a float32 input meets a bfloat16 weight and the linear layer raises.
    assert overlap_pass.make_traceable(sharded())(torch.ones(2, WIDTH)).dtype == torch.bfloat16


def test_asking_for_it_gathers_nothing_in_a_graph_and_compiles_once() -> None:
    model = overlap_pass.make_traceable(sharded())
    left: list[int] = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        drop_unused_gathers(gm)
        left.append(sum(node.target is gather for node in gm.graph.nodes))
        return gm

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(3):
        compiled(torch.ones(2, WIDTH)).sum().backward()
    assert left == [6]


def test_parameters_outside_forward_are_the_shards_also_in_compiled_code_and_hooks_of_backward() -> None:
    model = overlap_pass.make_traceable(sharded())
    shards = list(model.parameters())

    def kinds(x: Tensor) -> tuple[list[type], Tensor]:
        return [type(parameter) for parameter in model.parameters()], x + 1

    assert torch.compile(kinds, backend="eager")(torch.ones(1))[0] == [DTensor] * 6
    in_backward: list[bool] = []
    shards[0].register_post_accumulate_grad_hook(
        lambda _: in_backward.append(all(p is shard for p, shard in zip(model.parameters(), shards, strict=True)))
    )
    model(torch.ones(2, WIDTH)).sum().backward()
    assert in_backward == [True]


def test_names_prefixes_and_duplicates_are_those_of_torch() -> None:
    plain, model = Model(), Model()
    for each in (plain, model):
        each.head.weight = each.body.layers[0].weight
    overlap_pass.make_traceable(fully_shard(model))
    for options in ({}, {"prefix": "x"}, {"recurse": False}, {"remove_duplicate": False}):
        names = [[name for name, _ in each.named_parameters(**options)] for each in (plain, model)]
        assert names[0] == names[1]
    seen: list[list[str]] = []
    model.body.register_forward_pre_hook(
        lambda body, _: seen.append([f"{n} {p.dim()}" for n, p in body.named_parameters("x")])
    )
    model(torch.ones(2, WIDTH))
    assert seen == [["x.layers.0.weight 2", "x.layers.0.bias 1", "x.layers.1.weight 2", "x.layers.1.bias 1"]]


def test_modules_without_own_parameters_go_back_too() -> None:
    model = sharded()
    before = footprint(model)
    overlap_pass.restore(overlap_pass.make_traceable(model))
    assert footprint(model) == before


# -- what was captured


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_report_says_what_was_captured(checkpointed: bool, tmp_path: Path) -> None:
    model = overlap_pass.make_traceable(fully_shard(Checkpointed() if checkpointed else Model(), mp_policy=BF16))
    path = tmp_path / "report.json"
    compiled = torch.compile(model, backend="overlap_eager", fullgraph=True, options={"report": str(path)})
    compiled(torch.ones(2, WIDTH)).float().sum().backward()
    # By hand: three linear layers of 6 by 6, or three times 6 by 8 and back, with biases, 2 bytes each.
    parameters, size = (12, 2 * 3 * (8 * 6 + 8 + 6 * 8 + 6)) if checkpointed else (6, 2 * 3 * (6 * 6 + 6))
    assert dict(json.loads(path.read_text())["setting"])["captured"] == (
        f"1 units, {parameters} parameters, {size} B gathered as bfloat16 over 4 ranks (group "
        f"{dist.group.WORLD.group_name}), gradients reduced as float32"
    )


# -- overlap_pass.shard


def test_a_plain_module_is_sharded_in_fsdp2s_words() -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = TinyLlama()
    assert overlap_pass.shard(model, mesh, mp_policy=BF16, ignored_params={model.norm.weight}) is model
    assert isinstance(model, FSDPModule)
    assert not isinstance(model.norm.weight, DTensor)
    text = repr(overlap_pass.make_traceable(model))
    assert "gathered as bfloat16 over 4 ranks" in text
    assert "gathered again in backward" in text


def test_inner_modules_may_be_sharded_before_with_policies_of_their_own() -> None:
    model = TinyLlama()
    overlap_pass.shard(model.blocks[0], reshard_after_forward=False)
    overlap_pass.make_traceable(overlap_pass.shard(model))
    assert "kept for backward" in repr(model.blocks[0])
    assert "gathered again in backward" in repr(model)


def test_a_number_of_ranks_is_refused_before_anything_is_sharded() -> None:
    model = Model()
    before = footprint(model)
    with pytest.raises(ConversionError, match="Model: reshard_after_forward=2 is not supported: use True or False"):
        overlap_pass.shard(model, reshard_after_forward=2)
    assert footprint(model) == before


# -- activation checkpointing


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(3))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed_graphs(**options: Any) -> tuple[Graph, Graph]:
    model = Checkpointed(**options)
    for block in model.blocks:
        fully_shard(block)
    overlap_pass.make_traceable(fully_shard(model))
    graphs: list[Graph] = []

    def keep(gm: GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    x = torch.ones(3, WIDTH, requires_grad=True)
    torch.compile(model, backend=backend, fullgraph=True)(x).sum().backward()
    forward, backward = graphs
    return forward, backward


def gathered(graph: Graph) -> list[str]:
    return [n.meta["custom"][ANNOTATION]["parameter"] for n in graph.nodes if "all_gather" in str(n.target)]


@pytest.mark.parametrize(
    "options",
    [{}, {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}],
    ids=["everything", "selective"],
)
def test_recomputed_regions_gather_once_per_parameter_and_in_the_order_of_backward(options: dict[str, Any]) -> None:
    """The dropout in each block is also what torch 2.13 mixes up on a CPU when inputs are DTensors."""
    forward, backward = checkpointed_graphs(**options)
    assert len(gathered(forward)) == 12
    counts = Counter(gathered(backward))
    assert set(counts.values()) == {1}
    assert {f"blocks.{block}.{name}.weight" for block in range(3) for name in ("up", "down")} <= set(counts)
    blocks = [int(name.split(".")[1]) for name in gathered(backward) if name.endswith("down.weight")]
    assert blocks == [2, 1, 0]


def test_nothing_gathered_is_saved_for_backward() -> None:
    forward, _ = checkpointed_graphs()
    (output,) = forward.find_nodes(op="output")
    waits = {n for n in forward.nodes if "wait_tensor" in str(n.target)}
    assert not waits & set(output.all_input_nodes)
