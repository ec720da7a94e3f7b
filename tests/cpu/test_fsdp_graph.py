"""What the graphs of a converted model hold: a gather per parameter, a reduction per gradient, each with its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

import overlap_pass
from overlap_pass.fsdp.gather import ANNOTATION, GatherSpec, Reduction, drop_unused_gathers
from tests.cpu.models import TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks

WIDTH = 6


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Three blocks of four parameters each, checkpointed in one of three ways."""

    def __init__(self, checkpointed: str = "no") -> None:
        super().__init__()
        self.checkpointed = checkpointed
        blocks = [FeedForward() for _ in range(3)]
        self.blocks = nn.ModuleList(map(checkpoint_wrapper, blocks) if checkpointed == "wrapper" else blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed == "function" else block(x)
        return x


def stack(checkpointed: str = "no", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(checkpointed)
    for block in model.blocks:
        fully_shard(block, **options)
    return overlap_pass.make_traceable(fully_shard(model, **options))


class Capture:
    """A backend that keeps the joint graph and its two halves, and runs them as they are."""

    def __init__(self) -> None:
        self.dynamo: list[GraphModule] = []
        self.joint: list[Graph] = []
        self.forward: list[Graph] = []
        self.backward: list[Graph] = []

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Any:
        def partition(joint: GraphModule, joint_inputs: Any, **options: Any) -> Any:
            self.joint.append(joint.graph)
            return min_cut_rematerialization_partition(joint, joint_inputs, **options)

        def keep(graphs: list[Graph]) -> Any:
            def compiler(half: GraphModule, _: Any) -> Any:
                graphs.append(half.graph)
                return make_boxed_func(half.forward)

            return compiler

        self.dynamo.append(gm)
        backend = aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward), partition_fn=partition)
        return backend(gm, inputs)


def named(graph: Graph, name: str) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_function" and name in str(node.target)]


def gathers(graph: Graph) -> list[Node]:
    return named(graph, "all_gather_into_tensor")


def reductions(graph: Graph) -> list[Node]:
    return named(graph, "reduce_scatter_tensor")


def run(model: nn.Module, x: Tensor, **options: Any) -> Capture:
    capture = Capture()
    torch.compile(model, backend=capture, **{"fullgraph": True, **options})(x).float().sum().backward()
    return capture


def batch() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)


class Told(FeedForward):
    """A unit that is called with words that are no tensors, as those of transformers are."""

    def forward(self, x: Tensor, mask: Tensor | None = None, cached: bool = True, by: float = 1.0) -> Tensor:
        return by * super().forward(x) if mask is None and not cached else x


@pytest.mark.usefixtures("four_ranks")
class TestOneModel:
    def test_arguments_of_a_unit_may_be_anything(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = fully_shard(Told(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

            def forward(self, x: Tensor) -> Tensor:
                return self.block(x, mask=None, cached=False, by=2.0)

        capture = run(overlap_pass.make_traceable(fully_shard(Outer())), batch())
        assert [len(gathers(graph)) for graph in capture.forward] == [4]

    def test_each_parameter_is_gathered_once_and_each_gradient_reduced_once(self) -> None:
        capture = run(stack(), batch())
        assert [len(gathers(graph)) for graph in capture.forward] == [12]
        assert [len(reductions(graph)) for graph in capture.backward] == [12]
        assert [len(reductions(graph)) for graph in capture.forward] == [0]

    def test_the_call_of_a_gather_is_one_node_in_dynamos_graph(self) -> None:
        capture = run(stack(), batch())
        calls = [node for node in capture.dynamo[0].graph.nodes if getattr(node.target, "__name__", "") == "gather"]
        assert len(calls) == 12
        assert GatherSpec.from_json(calls[0].args[1]).parameter == "blocks.0.up.weight"

    def test_every_collective_knows_unit_parameter_and_reshard_in_all_three_graphs(self) -> None:
        model = stack()
        model.blocks[1].set_reshard_after_forward(False)
        capture = run(model, batch())
        expected = {
            f"blocks.{block}.{name}": {"unit": f"blocks.{block}", "reshard": block != 1}
            for block in range(3)
            for name in ("up.weight", "up.bias", "down.weight", "down.bias")
        }
        joint, forward, backward = capture.joint[0], capture.forward[0], capture.backward[0]
        for collectives in (gathers(joint), reductions(joint), gathers(forward), reductions(backward)):
            notes = [node.meta["custom"][ANNOTATION] for node in collectives]
            assert {note["parameter"]: {"unit": note["unit"], "reshard": note["reshard"]} for note in notes} == expected

    def test_casts_pads_and_waits_are_annotated_like_their_collective(self) -> None:
        capture = run(stack(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), batch())
        for launch in gathers(capture.joint[0]):
            note = launch.meta["custom"][ANNOTATION]
            (wait,) = launch.users
            chain = [launch, wait]
            while (before := chain[0].args[0]).op == "call_function":
                chain.insert(0, before)
            targets = [str(node.target).split(".")[1] for node in chain]
            # 8 rows of `up` go into four ranks, 6 rows of `down` do not.
            pad = ["constant_pad_nd"] if ".down." in note["parameter"] else []
            assert targets == ["view", "_to_copy", *pad, "all_gather_into_tensor", "wait_tensor"]
            assert [node.meta["custom"][ANNOTATION] for node in chain] == [note] * len(chain)

    def test_the_cast_happens_before_the_gather_so_that_bf16_travels(self) -> None:
        capture = run(stack(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), batch())
        assert {node.meta["val"].dtype for node in gathers(capture.joint[0])} == {torch.bfloat16}
        assert {node.meta["val"].dtype for node in reductions(capture.joint[0])} == {torch.float32}

    @pytest.mark.parametrize("checkpointed", ["wrapper", "function"])
    def test_activation_checkpointing_works_compiled_and_uncompiled(self, checkpointed: str) -> None:
        model = stack(checkpointed)
        capture = run(model, batch())
        assert [len(gathers(graph)) for graph in capture.forward] == [12]
        assert [len(reductions(graph)) for graph in capture.backward] == [12]
        model(batch()).sum().backward()

    def test_a_parameter_that_is_only_asked_for_its_dtype_can_be_left_ungathered(self) -> None:
        model = stack()
        forward = model.forward
        model.forward = lambda x: forward(x.to(model.blocks[2].down.weight.dtype))
        capture, dropped = Capture(), []

        def backend(gm: GraphModule, inputs: list[Any]) -> Any:
            dropped.append(drop_unused_gathers(gm))
            return capture(gm, inputs)

        torch.compile(model, backend=backend, fullgraph=True)(batch()).sum().backward()
        assert dropped == [1]
        assert len(gathers(capture.joint[0])) == 12

    def test_the_hooks_of_the_compiled_module_start_no_graphs_of_their_own(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        model = overlap_pass.make_traceable(fully_shard(FeedForward(), mp_policy=policy))
        capture = Capture()
        out = torch.compile(model, backend=capture)(batch())
        assert out.dtype == torch.float32
        assert len(capture.dynamo) == 1

    def test_a_change_of_reshard_after_forward_compiles_again(self) -> None:
        model, capture = stack(), Capture()
        compiled = torch.compile(model, backend=capture, fullgraph=True)
        compiled(batch())
        compiled(batch())
        assert len(capture.dynamo) == 1
        model.set_reshard_after_forward(False)
        compiled(batch())
        notes = [{node.meta["custom"][ANNOTATION]["reshard"] for node in gathers(graph)} for graph in capture.joint]
        assert notes == [{True}, {False}]

    def test_sequence_lengths_compile_twice_at_most(self) -> None:
        config = TinyLlamaConfig(blocks=1)
        model, capture = overlap_pass.make_traceable(sharded_llama(config)), Capture()
        compiled = torch.compile(model, backend=capture, fullgraph=True)
        for length in (8, 12, 16, 20):
            compiled(tokens(config, seed=0, length=length)).sum().backward()
        assert len(capture.dynamo) == 2

    def test_a_graph_break_inside_a_block_still_gathers_everything(self) -> None:
        model = stack()
        forward = FeedForward.forward

        def broken(block: FeedForward, x: Tensor) -> Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return forward(block, x)

        for block in model.blocks:
            block.forward = broken.__get__(block)
        capture = run(model, batch(), fullgraph=False)
        assert sum(len(gathers(graph)) for graph in capture.forward) == 12
        assert sum(len(reductions(graph)) for graph in capture.backward) == 12

    def test_parts_that_cannot_be_compiled_compute_with_gathered_parameters(self) -> None:
        model = Stack()
        model.own = nn.Parameter(torch.ones(WIDTH))
        model = overlap_pass.make_traceable(fully_shard(model))
        forward, seen = model.forward, []

        @torch._dynamo.disable
        def uncompiled(x: Tensor) -> Tensor:
            seen.append(model.own.shape)
            return x * model.own

        model.forward = lambda x: uncompiled(forward(x))
        run(model, batch(), fullgraph=False)
        assert seen == [torch.Size([WIDTH])]


def test_the_graph_is_the_same_on_every_rank_but_for_the_sizes_of_shards() -> None:
    """8 rows over 3 ranks: 3, 3 and 2; 6 rows: 2 each. Where one rank pads, all do."""
    graphs = []
    for rank in range(3):
        torch._dynamo.reset()
        with fake_ranks(3, rank=rank):
            graphs.append(run(stack(), batch()).joint[0])
    listings = [
        [(node.name, str(node.target), [n.name for n in node.all_input_nodes]) for node in g.nodes] for g in graphs
    ]
    assert listings[0] == listings[1] == listings[2]
    assert len(named(graphs[0], "constant_pad_nd")) == 12
    payloads = [[tuple(node.meta["val"].shape) for node in gathers(graph)] for graph in graphs]
    assert payloads[0] == payloads[1] == payloads[2]


SPEC = GatherSpec(
    unit="blocks.0",
    parameter="blocks.0.up.weight",
    shape=(8, WIDTH),
    shard_dim=0,
    padded_rows=3,
    param_dtype=torch.bfloat16,
    reduce_dtype=None,
    shard_group="0",
    shard_ranks=3,
    reduce_group="1",
    replicate_group=None,
    replicate_ranks=1,
    divide_factor=None,
    sum_only=False,
)


def test_a_spec_survives_json() -> None:
    assert GatherSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.padded
    assert SPEC.gather_dtype(torch.float32) is torch.bfloat16
    assert SPEC.gather_dtype(torch.int8) is torch.int8


@dataclasses.dataclass(frozen=True)
class Group:
    ranks: int

    def size(self) -> int:
        return self.ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (8, 1), (6, 1), (4, 4), (64, 1)])
@pytest.mark.parametrize("factor", [None, 1.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("sum_only", [False, True])
def test_gradients_are_divided_in_the_steps_that_fsdp2_takes(
    dtype: torch.dtype, shards: int, replicas: int, factor: float | None, sum_only: bool
) -> None:
    spec = dataclasses.replace(
        SPEC, shard_ranks=shards, replicate_ranks=replicas, divide_factor=factor, sum_only=sum_only
    )
    replica_group = Group(replicas) if replicas > 1 else None
    before, after, scatter, all_reduce = _get_gradient_divide_factors(
        Group(shards), replica_group, dtype, "cuda", factor, sum_only
    )
    names = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg"}
    # A sum with a factor on each input is spelled as a factor and a sum.
    premultiplied = scatter not in names
    expected = Reduction(
        scatter=names.get(scatter, "sum"),
        all_reduce=names[all_reduce],
        scale=1 / factor if premultiplied else None if before in (None, 1) else 1 / before,
        divide=None if after in (None, 1) else after,
    )
    assert spec.reduction(dtype) == expected
