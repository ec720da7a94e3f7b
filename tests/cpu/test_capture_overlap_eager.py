"""What can be said to ``fully_shard``, and models that are hard to capture, under ``overlap_eager`` on two gloo ranks.

Converted, compiled in one graph and scheduled, against eager FSDP2: three AdamW steps, every bit. The rows are those that
``test_backend_numerics`` does not have; ``test_fsdp_numerics`` has them without a schedule.

Where faults that users of similar tools met are tried, by their numbers in ``../shared/scenarios/CASES.md`` (those that
bring a model of their own run as they are in ``test_scenarios``, by the numbers that begin with S)::

    S11 B04  dtypes mixed            test_scenarios; here "a module left out, a parameter of another dtype"
    S13 B10  recomputed regions      test_scenarios; test_capture_forward; here "checkpointed", "selective"
    S22      cut between units       test_scenarios; here "a graph break in a block"
    S23 B43  no collective in sight  test_scenarios; test_fsdp_autoconvert; test_backend_inputs
    S31      gathered and saved      test_scenarios; test_backend_order; test_capture_forward
    S32 B11  accumulation            test_scenarios (each reduced); test_fsdp_accumulation (once)
    S37 B21  layers that are skipped test_scenarios; here "layers that are skipped"
    B19      frozen units            here "LoRA": the first and the last unit
    B40      HSDP                    test_fsdp_meshes
    B42      few gathers, other traffic  test_backend_numerics (reshard False); here "an all-to-all between two units"
    B44      symbolic sizes          S14 in test_scenarios; here "sequence lengths that change"
    B45      another model, no_grad  S18 in test_scenarios; here "evaluation, beside another model"

Numbers, ranks and settings (rows A and B, and B46 to B52)::

    S01 B01  hidden random state     test_scenarios; test_targets; tests/pure/test_verify_schedule
    S33 B05  packing order           test_scenarios (on ranks); every tensor keeps its own memory: tests/pure/test_coalescing
        B06  recycled buffers        tests/gpu/test_buffers, rehearsed in test_buffers
    S22 B07  unwaited values         test_scenarios; tests/pure/test_verify_schedule; test_backend_numerics (an input on its way)
    S16 B08  other dimensions        test_scenarios
        B09  two communicators       tests/gpu/test_buffers; numbers in tests/pure/test_verification
        B13  lost ordering edges     tests/pure/test_dag; test_backend_effects (tokens)
    S03 B14  a result nobody reads   test_scenarios; test_backend_effects (under both backends)
    S05 B15  each rank's own clock   test_scenarios; tests/pure/test_agreement; test_ranks_agree
    S12 B18  two communicators       test_scenarios; tests/pure/test_in_flight
    S27 B20  hash seeds              test_scenarios; tests/pure/test_strategies_promises
    S19 B46  settings left behind    test_scenarios; test_backend_order; test_nothing_leaks
        B47  caches                  test_backend_caches; test_saved_plans
    S15 B49  joined launches         test_scenarios; tests/pure/test_coalescing; tests/pure/test_dag
        B52  settings ignored        tests/pure/test_config; test_backend_inputs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import overlap_pass
from tests.cpu.models import TinyLlama, TinyLlamaConfig, tokens
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.test_fsdp_numerics import BF16, columns, doors, few, grouped_llama, llama
from tests.cpu.training import Recipe, adamw, compare, differences, float_batch, token_batch, train

WIDTH = 9


def tied() -> nn.Module:
    return llama(config=TinyLlamaConfig(blocks=1, tied=True), policy=BF16)


def root_only() -> nn.Module:
    torch.manual_seed(0)
    return overlap_pass.shard(TinyLlama(TinyLlamaConfig(blocks=1)))


def nested() -> nn.Module:
    """Units in units."""
    torch.manual_seed(0)
    model = TinyLlama(TinyLlamaConfig(blocks=1))
    fully_shard(model.blocks[0].attention)
    fully_shard(model.blocks[0])
    return fully_shard(model)


def full_precision_norm() -> nn.Module:
    """A module left out of mixed precision, and one whose parameters are bf16 from the start, each a unit of its own."""
    torch.manual_seed(0)
    model = TinyLlama(TinyLlamaConfig(blocks=1))
    fully_shard(model.blocks[0].attention.out.to(torch.bfloat16), mp_policy=BF16)
    fully_shard(model.norm, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    fully_shard(model.blocks[0], mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


def from_meta() -> nn.Module:
    with torch.device("meta"):
        model = TinyLlama(TinyLlamaConfig(blocks=1))
    fully_shard(model.blocks[0])
    fully_shard(model).to_empty(device="cpu")
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
        model.scale.fill_(1)
    return model


class LowRank(nn.Module):
    """A frozen weight and a trainable correction of low rank, of fewer rows than some have ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """LoRA: the first and the last unit are frozen as a whole, those between but for their adapters."""
    torch.manual_seed(0)
    frozen = [nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(frozen[0], LowRank(WIDTH), nn.Tanh(), LowRank(WIDTH), frozen[1])
    for part in model:
        if next(part.parameters(), None) is not None:
            fully_shard(part, mp_policy=BF16)
    return fully_shard(model, mp_policy=BF16)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                x = torch.tanh(layer(x))
        return x


def skipping() -> nn.Module:
    torch.manual_seed(0)
    model = Skipping()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batch_and_layer_to_skip(model: nn.Module, number: int) -> tuple[Any, ...]:
    """The same layer on every rank, another in each step, one of them twice."""
    return (*float_batch(WIDTH, model, number), (3, 1, 3, 0, 1)[number])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 4), nn.Linear(WIDTH + 4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.silu(self.up(x)), 0.3))


class Checkpointed(nn.Module):
    """Blocks with dropout, recomputed in backward with the masks of the forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Dropping() for _ in range(3))
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


def checkpointed(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Checkpointed(**options)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def with_masks(build: Callable[[], nn.Module], recipe: Recipe, *, fullgraph: bool = True) -> tuple[list[str], int]:
    """:func:`compare`, with the same random masks on both sides."""
    trainings = []
    for compile in (lambda model: model, partial(torch.compile, backend="overlap_eager", fullgraph=fullgraph)):
        model = build()
        optimizer = adamw(model)
        call = compile(model)
        torch.manual_seed(7 + dist.get_rank())
        trainings.append(train(model, optimizer, recipe, call=call))
    expected, found = trainings
    return differences(expected, found), sum(g is not None and bool(g.any()) for g in found.gradients[0].values())


class Routed(nn.Module):
    """Rows go to the other rank and come back, as tokens do to experts, between two sharded layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.expert, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        there = all_to_all_single_autograd(self.before(x), None, None, group)
        back = all_to_all_single_autograd(torch.tanh(self.expert(there)), None, None, group)
        return self.after(back)


def routed() -> nn.Module:
    torch.manual_seed(0)
    model = Routed()
    for layer in (model.before, model.expert, model.after):
        fully_shard(layer)
    return fully_shard(model)


def rows(model: nn.Module, number: int) -> tuple[Any, ...]:
    return (torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())),)


def sentences(model: nn.Module, number: int) -> tuple[Any, ...]:
    """Longer in every step."""
    return (tokens(model.config, seed=10 * number + dist.get_rank(), length=6 + 3 * number),)


def broken_in_pieces() -> tuple[list[str], int]:
    """A graph break inside a block: several graphs, each with its own collectives, and numbers as ever."""
    forward = Dropping.forward

    def broken(block: Dropping, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return forward(block, x)

    def build() -> nn.Module:
        model = checkpointed()
        for block in model.blocks:
            block.forward = broken.__get__(block)
        model.forward = lambda x: model.blocks[2](model.blocks[1](model.blocks[0](x)))
        return model

    return with_masks(build, FLOATS, fullgraph=False)


def evaluation_beside_another_model() -> tuple[list[str], int]:
    """Training steps with an evaluation between them, and a model without a collective through the same backend."""
    other = nn.Linear(WIDTH, WIDTH)
    compiled_other = torch.compile(other, backend="overlap_eager", fullgraph=True)
    reference, model = llama(), overlap_pass.make_traceable(llama())
    compiled = torch.compile(model, backend="overlap_eager", fullgraph=True)
    optimizers = [adamw(reference), adamw(model)]
    wrong = []
    for step in range(2):
        recipe = Recipe(steps=1, first=step)
        found = train(model, optimizers[1], recipe, call=compiled)
        wrong += differences(train(reference, optimizers[0], recipe), found)
        batch = token_batch(model, 50 + step)
        with torch.no_grad():
            wrong += [] if torch.equal(reference(*batch), compiled(*batch)) else ["evaluation"]
        x = torch.ones(2, WIDTH)
        wrong += [] if torch.equal(other(x), compiled_other(x)) else ["another model"]
    return wrong, len(found.gradients[0])


LLAMA, FLOATS = Recipe(), Recipe(partial(float_batch, WIDTH))
DOORS = Recipe(partial(float_batch, 7))
SELECTIVE = partial(create_selective_checkpoint_contexts, keep_products)

CASES: dict[str, tuple[Callable[[], nn.Module], Recipe]] = {
    "root only": (root_only, LLAMA),
    "units in units": (nested, LLAMA),
    "two modules in one unit": (grouped_llama, LLAMA),
    "cast_forward_inputs on and off": (partial(doors, None), DOORS),
    "output_dtype of a block": (partial(doors, torch.float64), DOORS),
    "a module left out, a parameter of another dtype": (full_precision_norm, LLAMA),
    "tied, bf16": (tied, LLAMA),
    "ignored parameters": (partial(llama, ignored="norm"), LLAMA),
    "sharded by columns": (partial(llama, shard_placement_fn=columns), LLAMA),
    "few rows, unused parameters": (few, Recipe(partial(float_batch, 4))),
    "from the meta device": (from_meta, LLAMA),
    "clipped gradients": (llama, Recipe(clip=0.01)),
    "LoRA": (adapted, FLOATS),
    "LoRA, reduced once": (adapted, Recipe(partial(float_batch, WIDTH), accumulate=2, reduced="once", steps=2)),
    "an all-to-all between two units": (routed, Recipe(rows)),
    "sequence lengths that change": (llama, Recipe(sentences, steps=4)),
    "layers that are skipped": (skipping, Recipe(batch_and_layer_to_skip, steps=5)),
}
RUNS = {
    **{name: partial(compare, build, recipe, "overlap_eager") for name, (build, recipe) in CASES.items()},
    "checkpointed dropout": partial(with_masks, checkpointed, FLOATS),
    "selective checkpointing": partial(with_masks, partial(checkpointed, context_fn=SELECTIVE), FLOATS),
    "a graph break in a block": broken_in_pieces,
    "evaluation, beside another model": evaluation_beside_another_model,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2, limit_s=600)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0
