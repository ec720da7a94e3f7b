"""Micro-batches whose gradients are reduced once, with the last: the numbers of eager FSDP2, bit for bit.

``set_requires_gradient_sync(False)`` under FSDP2 adds up gradients of whole parameters, in the dtype that they are
reduced in, and reduces the sum. Two gloo ranks; converted and scheduled by ``overlap_eager``, or uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import overlap_pass
from compile_backends.compilation import Compilation
from overlap_pass.graph.program import CollectiveKind, Phase, Role
from overlap_pass.graph.read import phase_of, read_program
from tests.cpu.models import TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import Outcome, fake_ranks, run_cases
from tests.cpu.test_fsdp_numerics import BF16, BF16_ALL, FP16_REDUCE, columns, frozen_llama, llama
from tests.cpu.training import Recipe, adamw, compare, float_batch, mean_square, train

WIDTH = 5


class Skipping(nn.Module):
    """Leaves its middle layer out when told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        for number, layer in enumerate(self.layers):
            if not (skip and number == 1):
                x = torch.tanh(layer(x))
        return x


def skipping(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Skipping()
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def last_without_the_middle(model: nn.Module, number: int) -> tuple[Any, ...]:
    """Of three micro-batches, the last does not use the middle layer, whose gradient is reduced all the same."""
    return (*float_batch(WIDTH, model, number), number % 3 == 2)


def tied() -> nn.Module:
    return llama(config=TinyLlamaConfig(blocks=1, tied=True), policy=BF16)


def forwards_before_backwards(backend: str) -> float:
    """Largest difference from eager FSDP2, relative to the largest gradient.

    Three forwards, then a backward through the first, which holds its gradients back, and one through both others.
    """
    gradients = []
    for convert in (lambda model: model, overlap_pass.make_traceable):
        model = convert(skipping())
        call = torch.compile(model, backend=backend, fullgraph=True) if gradients else model
        losses = []
        for number, reduces in enumerate((False, True, True)):
            model.set_requires_gradient_sync(reduces)
            losses.append(mean_square(call(*float_batch(WIDTH, model, number), False)))
        model.set_requires_gradient_sync(False)  # eager FSDP2 looks at it in backward
        losses[0].backward()
        model.set_requires_gradient_sync(True)
        (losses[1] + losses[2]).backward()
        gradients.append(torch.cat([p.grad.to_local().flatten() for p in model.parameters()]))
    expected, found = gradients
    return ((expected - found).abs().max() / expected.abs().max()).item()


THREE = Recipe(accumulate=3, reduced="once", steps=2)
SKIPPED = Recipe(last_without_the_middle, accumulate=3, reduced="once", steps=2)
HSDP = partial(llama, mesh=(2, 1), policy=BF16)

# Name -> what is built, how it is trained, and how it is run.
CASES: dict[str, tuple[Callable[[], nn.Module], Recipe, tuple[str | None, ...]]] = {
    "fp32": (llama, THREE, (None, "overlap_eager")),
    "bf16, added and reduced in fp32": (partial(llama, policy=BF16), THREE, (None, "overlap_eager")),
    "bf16, added and reduced in bf16": (partial(llama, policy=BF16_ALL), THREE, (None,)),
    "reduced in fp16, divided before and after": (partial(llama, policy=FP16_REDUCE), THREE, (None,)),
    "sharded by columns": (partial(llama, shard_placement_fn=columns), THREE, (None,)),
    "tied": (tied, THREE, (None, "overlap_eager", "aot_eager")),
    "frozen parameters": (frozen_llama, THREE, ("overlap_eager",)),
    "HSDP": (HSDP, THREE, (None, "overlap_eager")),
    "HSDP, all-reduced once": (HSDP, Recipe(accumulate=3, reduced="all-reduce once", steps=2), (None, "overlap_eager")),
    "a layer that the last does not use": (skipping, SKIPPED, (None, "overlap_eager")),
}
RUNS: dict[str, Callable[[], tuple[list[str], int]]] = {
    f"{name}, {backend or 'uncompiled'}": partial(compare, build, recipe, backend)
    for name, (build, recipe, backends) in CASES.items()
    for backend in backends
    if (name, backend) != ("tied", "aot_eager")
}


def tied_without_our_passes() -> float:
    """Largest difference, relative to the largest gradient, where nobody folds the two uses: each is reduced."""
    recipe = Recipe(accumulate=2, reduced="once", steps=1)
    gradients = []
    for backend in (None, "aot_eager"):
        model = overlap_pass.make_traceable(sharded_llama(TinyLlamaConfig(blocks=1, tied=True)))
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        gradients.append(train(model, adamw(model), recipe, call=call).gradients[0]["embedding.weight"])
    one, other = gradients
    return ((one - other).abs().max() / one.abs().max()).item()


TO_ROUNDING = {
    "tied, and a backend without our passes": tied_without_our_passes,
    "several forwards before one backward": partial(forwards_before_backwards, "overlap_eager"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases({**RUNS, **TO_ROUNDING}, ranks=2, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0


@pytest.mark.parametrize("run", TO_ROUNDING)
def test_what_waits_is_taken_once_where_several_reductions_could_take_it(
    run: str, outcomes: dict[str, Outcome]
) -> None:
    """Each use is reduced on its own, which rounds differently; counted twice, what waits would show in the first digit."""
    for difference in outcomes[run].values():
        assert difference <= 8 * torch.finfo(torch.float32).eps


# -- graphs


@pytest.fixture
def four_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_ranks(4):
        yield


@pytest.mark.usefixtures("four_ranks")
def test_micro_batches_compile_two_graphs_and_only_the_last_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = []
    schedule = Compilation.schedule

    def watched(compilation: Compilation, graph: torch.fx.Graph) -> None:
        programs.append(read_program(graph, phase_of(graph)))
        schedule(compilation, graph)

    monkeypatch.setattr(Compilation, "schedule", watched)
    model = overlap_pass.make_traceable(sharded_llama(TinyLlamaConfig(blocks=1), mp_policy=BF16))
    compiled = torch.compile(model, backend="overlap_eager", fullgraph=True)
    for _ in range(2):
        for last in (False, False, False, True):
            model.set_requires_gradient_sync(last)
            compiled(tokens(model.config, seed=0)).sum().backward()
    backwards = [program for program in programs if program.phase is Phase.BACKWARD]
    assert len(programs) == 4
    reductions = [
        [op for op in program.launches if op.collective.kind is CollectiveKind.REDUCE_SCATTER] for program in backwards
    ]
    parameters = len(list(model.parameters()))
    assert [len(found) for found in reductions] == [0, parameters]
    # What waits is added right before the reduction and moves with it.
    assert {op.collective.role for op in reductions[1]} == {Role.GRADIENT}
    added = [op for op in backwards[1].ops if "add_held" in op.target]
    assert len(added) == parameters
    assert not any(op.opaque for op in added)
    assert not any("add_held" in op.target for op in backwards[0].ops)


@pytest.mark.usefixtures("four_ranks")
def test_a_model_that_always_reduces_has_nothing_to_look_for() -> None:
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen.extend(str(node.args) for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "gather")
        return gm

    model = overlap_pass.make_traceable(sharded_llama(TinyLlamaConfig(blocks=1)))
    model.set_requires_gradient_sync(True)
    torch.compile(model, backend=backend, fullgraph=True)(tokens(model.config, seed=0)).sum().backward()
    assert seen
    assert not any("#" in arguments for arguments in seen)
