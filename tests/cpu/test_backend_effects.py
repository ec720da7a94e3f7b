"""Operators that the pass does not know, effects that have an order, and what is left behind: nothing crosses, nothing leaks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.fx as fx
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.fx.experimental.proxy_tensor import make_fx

from compile_backends import compilation
from overlap_pass.graph.program import CollectiveKind, OpKind, Phase, Program
from overlap_pass.graph.read import read_program
from overlap_pass.planning import Plan
from overlap_pass.schedule.verify import violations
from tests.cpu.models import TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks
from tests.cpu.test_backend_numerics import SLOW
from tests.cpu.test_backend_order import Compiled, GeneratedOnly, generated_code


@torch.library.custom_op("overlap_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * 2


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(2):
        yield


def planned(step: Callable[..., Tensor], *inputs: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Plan:
    """The plan of a function's only graph."""
    plans: list[Plan] = []
    make_plan = compilation.make_plan

    def watched(*args: Any, **named: Any) -> Plan:
        plans.append(make_plan(*args, **named))
        return plans[-1]

    monkeypatch.setattr(compilation, "make_plan", watched)
    options = {"hardware": SLOW, "memory_budget": "unlimited", "strategy": "greedy", **options}
    with torch.no_grad():
        torch.compile(step, backend="overlap_eager", fullgraph=True, options=options)(*inputs)
    (plan,) = plans
    return plan


def gather_behind(x: Tensor, shard: Tensor) -> Tensor:
    y = scaled(torch.tanh(x @ x))
    return y @ collectives.wait_tensor(collectives.all_gather_tensor(shard, 0, dist.group.WORLD))


@pytest.mark.parametrize(("options", "crosses"), [({}, False), ({"pure_namespaces": ["overlap_tests"]}, True)])
def test_an_unknown_operator_is_crossed_only_if_the_user_says_that_it_is_pure(
    options: dict[str, Any], crosses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(gather_behind, torch.ones(8, 8), torch.ones(4, 8), monkeypatch=monkeypatch, **options)
    (gather,) = (op.name for op in plan.program.launches)
    (custom,) = (op.name for op in plan.program.ops if "overlap_tests" in op.target)
    at = {name: step for step, name in enumerate(plan.schedule.order)}
    assert plan.program.index[custom] < plan.program.index[gather]
    assert (at[gather] < at[custom]) is crosses


def test_effects_keep_their_order_and_their_tokens_hold_no_memory() -> None:
    """As AOTAutograd writes them: each effect takes the token of the one before and returns another."""
    program = read_program(_with_tokens().graph, Phase.FORWARD)
    first, second = (op for op in program.ops if "with_effects" in op.target)
    assert first.opaque
    assert second.opaque
    assert any(
        "crosses an opaque op" in found for found in violations(program, _swapped(program, first.name, second.name))
    )
    tokens = [op for op in program.ops if op.kind is OpKind.INPUT and "token" in op.name]
    assert [program.storages[s].size_bytes for op in tokens for s in op.storages] == [0]
    gather = program.launches[0]
    assert any(
        "crosses an opaque op" in found for found in violations(program, _swapped(program, first.name, gather.name))
    )


def _with_tokens() -> fx.GraphModule:
    def step(token: Tensor, x: Tensor, shard: Tensor) -> tuple[Tensor, ...]:
        return token, x, shard

    gm = make_fx(step, tracing_mode="fake")(torch.ones(0), torch.ones(4), torch.ones(4))
    token, x, shard = gm.graph.find_nodes(op="placeholder")
    token.name = "token_0"
    functional, output = torch.ops._c10d_functional, next(iter(gm.graph.find_nodes(op="output")))
    with gm.graph.inserting_before(output):
        for _ in range(2):
            pair = gm.graph.call_function(torch.ops.higher_order.with_effects, (token, torch.ops.aten.mul.Tensor, x, 2))
            pair.meta["val"] = (token.meta["val"], x.meta["val"].clone())
            token, x = (gm.graph.call_function(operator.getitem, (pair, index)) for index in range(2))
            token.meta["val"], x.meta["val"] = pair.meta["val"]
        launch = gm.graph.call_function(
            functional.all_gather_into_tensor.default, (shard, 2, dist.group.WORLD.group_name)
        )
        wait = gm.graph.call_function(functional.wait_tensor.default, (launch,))
        launch.meta["val"] = wait.meta["val"] = torch.empty(8, device="meta")
    output.args = ((token, x, wait),)
    return gm


def _swapped(program: Program, first: str, second: str) -> tuple[str, ...]:
    """Both with what only they read in front of them; ``second`` before ``first``."""
    rest = [name for name in program.order if name != second]
    rest.insert(rest.index(first), second)
    return tuple(rest)


def reduced_for_others(x: Tensor) -> Tensor:
    """Adds up over all ranks what this one does not read."""
    collectives.wait_tensor(collectives.all_reduce(x * 2, "sum", dist.group.WORLD))
    return x + 1


def test_a_collective_that_this_rank_does_not_read_is_launched_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others wait for it: in the plan, and in the code that Inductor writes."""
    plan = planned(reduced_for_others, torch.ones(4), monkeypatch=monkeypatch)
    assert [op.collective.kind for op in plan.program.launches] == [CollectiveKind.ALL_REDUCE]
    found = Compiled()
    with torch.no_grad(), generated_code(found), pytest.raises(GeneratedOnly):
        torch.compile(reduced_for_others, backend="overlap", fullgraph=True)(torch.ones(4))
    assert "_c10d_functional.all_reduce" in found.code[0]


def test_no_process_group_and_no_stream_is_left() -> None:
    """And none is made: collectives run on the groups that the model names."""
    before = list(distributed_c10d._world.pg_map)
    model = sharded_llama(TinyLlamaConfig(blocks=1))
    torch.compile(model, backend="overlap_eager", fullgraph=True)(tokens(model.config, seed=0)).sum().backward()
    assert list(distributed_c10d._world.pg_map) == before
