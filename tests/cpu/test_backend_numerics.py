"""What a user gets who only writes ``torch.compile(model, backend=...)``: the numbers of eager FSDP2, on two gloo ranks.

Every case trains two copies of a ``fully_shard`` model for three AdamW steps: one under FSDP2 as torch has it, one compiled
with ``overlap_eager`` by the literal call, nothing else. Losses, every gradient of every step and the parameters at the
end are compared with ``torch.equal`` on each rank. Two ranks have one order to sum in, so there is no tolerance.

Inductor fuses, and fused kernels round differently from eager ones. ``overlap`` is therefore compared, as strictly, with
itself in the order as written.

The collectives are planned for an imagined device that computes as slowly as it communicates: on a real one these models
would be bound by the CPU, no move would pay, and the order as written would be compared with itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from compile_backends import compilation
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.graph.program import Program
from overlap_pass.planning import Plan
from overlap_pass.profiling.llama import Llama as RealLlama
from overlap_pass.profiling.llama import LlamaConfig
from overlap_pass.profiling.llama import shard as shard_llama
from overlap_pass.schedule.types import Action
from tests.cpu.models import RMSNorm, TinyLlama, TinyLlamaConfig, sharded_llama
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, Training, adamw, differences, float_batch, train

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

_H100 = load_hardware("h100")
SLOW = replace(
    _H100,
    name="slow",
    compute=replace(_H100.compute, kernel_us=20.0, matmul_ramp_us=20.0, kernel_launch_us=0.0, collective_launch_us=0.0),
    copy_engine=None,
)

# -- models


def llama(**options: Any) -> TinyLlama:
    return sharded_llama(TinyLlamaConfig(blocks=1), **options)


def hsdp(replicas: int, shards: int) -> TinyLlama:
    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    return llama(mesh=mesh, mp_policy=BF16)


def tied_llama() -> TinyLlama:
    return sharded_llama(TinyLlamaConfig(blocks=1, tied=True))


def frozen_llama() -> TinyLlama:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("feed_forward" in name)
    return model


class Mixer(nn.Module):
    """Norm, up, silu, dropout, down; widths that two ranks do not divide."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = RMSNorm(width), dropout
        self.up, self.down = nn.Linear(width, width + 4), nn.Linear(width + 4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.silu(self.up(self.norm(x))), self.dropout, self.training))


class Stack(nn.Module):
    """Mixers, each checkpointed or none."""

    width = 9

    def __init__(self, *, blocks: int = 3, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixer(self.width, dropout) for _ in range(blocks))
        self.head = nn.Linear(self.width, 5)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def stack(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(**options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def llama_with_its_loss() -> nn.Module:
    """The package's own model: rotary embedding, grouped keys and values, the loss inside."""
    torch.manual_seed(0)
    return shard_llama(RealLlama(LlamaConfig(1, 16, 4, 2, 20, 30, max_tokens=8)), mp_policy=BF16)


def tokens_and_targets(model: nn.Module, number: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return tuple(torch.randint(0, model.config.vocab_size, (2, 8), generator=generator) for _ in range(2))


def not_waited_for(model: nn.Module, number: int) -> tuple[Any, ...]:
    """The sum of all ranks' batches, still on its way when the model gets it."""
    (x,) = float_batch(Stack.width, model, number)
    return (all_reduce(x, "sum", dist.group.WORLD),)


# -- cases

TOKENS = Recipe()
STACK = Recipe(partial(float_batch, Stack.width))


@dataclass(frozen=True, slots=True)
class Case:
    """What is built, how it is trained, and what a user passes.

    Attributes:
        options: those of the backend, beside the hardware.
        in_place: ``model.compile(backend=...)`` in place of ``torch.compile(model, backend=...)``.
        moves: whether collectives must run elsewhere than written.
    """

    build: Callable[[], nn.Module] = llama
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe = TOKENS
    in_place: bool = False
    moves: bool = True


UNLIMITED = {"memory_budget": "unlimited"}

CASES = {
    "fp32, uneven shards": Case(),
    "bf16, reduced in fp32": Case(partial(llama, mp_policy=BF16)),
    "reshard_after_forward False": Case(partial(llama, reshard_after_forward=False)),
    "HSDP, 2 replicas of 1 shard": Case(partial(hsdp, 2, 1), UNLIMITED),
    "frozen parameters": Case(frozen_llama),
    "accumulation over two batches": Case(recipe=Recipe(accumulate=2)),
    "dropout": Case(partial(stack, dropout=0.3), recipe=STACK),
    "activation checkpointing": Case(partial(stack, checkpointed=True), recipe=STACK),
    "checkpointed dropout": Case(partial(stack, dropout=0.3, checkpointed=True), recipe=STACK),
    "tied weights": Case(tied_llama),
    "the loss in the model": Case(llama_with_its_loss, recipe=Recipe(tokens_and_targets)),
    "model.compile": Case(partial(stack), recipe=STACK, in_place=True),
    "the order as written": Case(partial(stack), {"strategy": "as_written"}, STACK, moves=False),
    "backward_pre": Case(partial(stack), {"strategy": "backward_pre", **UNLIMITED}, STACK),
    "fill_gaps": Case(partial(stack), {"strategy": "fill_gaps", **UNLIMITED}, STACK),
    "local_search": Case(partial(stack), {"strategy": "local_search", **UNLIMITED}, STACK),
    "latest_start, no bound": Case(partial(stack), {"strategy": "latest_start", **UNLIMITED}, STACK),
    "one communicator at a time": Case(partial(hsdp, 2, 1), {"communicators_in_flight": 1, **UNLIMITED}),
    "the order as written, one at a time": Case(
        partial(hsdp, 2, 1), {"strategy": "as_written", "communicators_in_flight": 1}, moves=False
    ),
    "activations let loose": Case(partial(stack), {"launch_order": "free", **UNLIMITED}, STACK),
    "an input that is still on its way": Case(partial(stack), recipe=Recipe(not_waited_for)),
    "no byte more than as written": Case(partial(stack), {"memory_budget": "1.0x"}, STACK),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """What one rank planned for one graph.

    Attributes:
        launches: hash of the launches in their order.
        collectives: how many there were before any were coalesced.
        moved: how many collectives run elsewhere than written.
        peaks_bytes: predicted peak as written and as scheduled.
        budget_bytes: what the latter may be, ``None`` for any.
    """

    launches: str
    collectives: int
    moved: int
    peaks_bytes: tuple[int, int]
    budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank saw of a case.

    Attributes:
        wrong: losses, gradients and parameters that differ in a bit.
        nonzero_gradients: a comparison of zeros would show nothing.
        plans: one for each graph, forward first.
    """

    wrong: list[str]
    nonzero_gradients: int
    plans: list[Planned]


@contextmanager
def watched_plans() -> Iterator[list[Planned]]:
    """Collects what the backend plans meanwhile."""
    plans: list[Planned] = []
    original = compilation.make_plan

    def watched(program: Program, *args: Any, **options: Any) -> Plan:
        plan = original(program, *args, **options)
        moved = sum(decision.action in (Action.HOIST, Action.SINK) for decision in plan.schedule.decisions)
        peaks_bytes = plan.memory_before.peak_bytes, plan.memory_after.peak_bytes
        plans.append(Planned(plan.skeleton, len(program.launches), moved, peaks_bytes, plan.budget_bytes))
        return plan

    compilation.make_plan = watched
    try:
        yield plans
    finally:
        compilation.make_plan = original


def against_eager_fsdp2(case: Case) -> Found:
    expected = _trained(case.build(), case.recipe, compile=None)
    settings = {"backend": "overlap_eager", "fullgraph": True, "options": {"hardware": SLOW, **case.options}}
    compile = partial(_in_place if case.in_place else torch.compile, **settings)
    with watched_plans() as plans:
        found = _trained(case.build(), case.recipe, compile=compile)
    return Found(differences(expected, found), _nonzero(found), plans)


def without_a_single_option() -> Found:
    """The shortest line that a user can write."""
    expected = _trained(llama(), Recipe(), compile=None)
    with watched_plans() as plans:
        found = _trained(llama(), Recipe(), compile=partial(torch.compile, backend="overlap_eager"))
    return Found(differences(expected, found), _nonzero(found), plans)


def under_inductor() -> Found:
    """Scheduled against the order as written, both compiled by Inductor."""
    written = partial(torch.compile, backend="overlap", options={"strategy": "as_written"})
    scheduled = partial(torch.compile, backend="overlap", options={"hardware": SLOW, "memory_budget": "unlimited"})
    with no_compile_cache():  # a graph from a cache was planned when it was put there
        expected = _trained(stack(blocks=2), STACK, compile=written)
        with watched_plans() as plans:
            found = _trained(stack(blocks=2), STACK, compile=scheduled)
    return Found(differences(expected, found), _nonzero(found), plans)


@contextmanager
def no_compile_cache() -> Iterator[None]:
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield


def _in_place(model: nn.Module, **settings: Any) -> nn.Module:
    model.compile(**settings)
    return model


def _trained(model: nn.Module, recipe: Recipe, *, compile: Callable[[nn.Module], Any] | None) -> Training:
    optimizer = adamw(model)
    call = model if compile is None else compile(model)
    torch.manual_seed(7 + dist.get_rank())  # masks of dropout are part of the numbers
    return train(model, optimizer, recipe, call=call)


def _nonzero(training: Training) -> int:
    return sum(bool(g.any()) for step in training.gradients for g in step.values() if g is not None)


RUNS: dict[str, Callable[[], Found]] = {
    **{name: partial(against_eager_fsdp2, case) for name, case in CASES.items()},
    "no options": without_a_single_option,
    "inductor": under_inductor,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_every_bit_is_the_same(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, found in enumerate(outcomes[run].values()):
        assert found.wrong == [], f"rank {rank}"
        assert found.nonzero_gradients > 0


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_plan_the_same_launches(run: str, outcomes: dict[str, Outcome]) -> None:
    first, second = ([plan.launches for plan in found.plans] for found in outcomes[run].values())
    assert first == second
    assert first, "nothing was planned"


def test_the_second_micro_batch_compiles_nothing(outcomes: dict[str, Outcome]) -> None:
    assert len(outcomes["accumulation over two batches"].values()[0].plans) == 2


@pytest.mark.parametrize("name", CASES)
def test_collectives_run_elsewhere_than_written(name: str, outcomes: dict[str, Outcome]) -> None:
    plans = outcomes[name].values()[0].plans
    assert any(plan.moved for plan in plans) is CASES[name].moves


def test_what_inductor_compiled_was_in_another_order(outcomes: dict[str, Outcome]) -> None:
    plans = outcomes["inductor"].values()[0].plans
    assert all(plan.moved for plan in plans)


@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_keeps_the_budget(name: str, outcomes: dict[str, Outcome]) -> None:
    for plan in outcomes[name].values()[0].plans:
        before, after = plan.peaks_bytes
        if CASES[name].options.get("memory_budget") == "1.0x":
            assert after <= before
        assert plan.budget_bytes is None or after <= plan.budget_bytes
