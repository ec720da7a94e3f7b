"""The planned order survives Inductor: what the generated code launches, waits for and multiplies, in that order.

The code is generated for rank 0 of 8 and neither compiled by a C++ compiler nor run, so this takes seconds. Each line of
it that launches, waits, multiplies or attends becomes a token; a collective is numbered by its launch, so that a wait in
the place of another one is seen::

    launch 0, launch 1, wait 0, matmul, launch 2, wait 1, matmul, …
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_backends import compilation
from overlap_pass.graph.program import Category, Lease, OpKind, Phase, Program, Role
from overlap_pass.planning import Plan
from tests.cpu.models import TinyLlama, TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks
from tests.cpu.test_backend_numerics import SLOW

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAUNCH, WAIT, MATMUL, ATTENTION = "launch", "wait", "matmul", "attention"


class GeneratedOnly(Exception):
    """The generated code was called: there is nothing to run."""


@dataclass
class Compiled:
    """What one compilation of forward and backward left behind.

    Attributes:
        programs: graphs as Inductor wanted to run them.
        plans: what became of them.
        orders: names of its ops in the order that was given to Inductor: the planned one, but for sums that make room
            for another exchange.
        code: the generated code of each.
        events: who looked at a graph, in order: a pass of the user's own, the planner.
    """

    programs: list[Program] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    orders: list[list[str]] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def graph(self, phase: Phase) -> tuple[Program, Plan, str]:
        (index,) = [i for i, program in enumerate(self.programs) if program.phase is phase]
        return self.programs[index], self.plans[index], self.code[index]


@contextmanager
def generated_code(into: Compiled) -> Iterator[None]:
    """Inductor goes as far as the code of both graphs, and leaves it and the plans in ``into``.

    No graph comes from a cache, and the user has a pass of their own.
    """
    make_plan = compilation.make_plan

    def watched(program: Program, *args: Any, **options: Any) -> Plan:
        into.events.append("plan")
        into.programs.append(program)
        into.plans.append(make_plan(program, *args, **options))
        return into.plans[-1]

    give_places = compilation.give_places

    def placed(graph: torch.fx.Graph, leases: Mapping[str, Lease]) -> None:
        give_places(graph, leases)
        into.orders.append([node.name for node in graph.nodes])

    class Module:
        def __init__(self, code: str) -> None:
            into.code.append(code)

        def call(self, arguments: list[Any]) -> None:
            raise GeneratedOnly

    users_pass = partial(_note, into.events)
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor_config.patch(fx_graph_cache=False, post_grad_custom_post_pass=users_pass),
        # Else the backward would be compiled when it first runs.
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
    ):
        patch.setattr(compilation, "make_plan", watched)
        patch.setattr(compilation, "give_places", placed)
        patch.setattr(GraphLowering, "compile_to_module", lambda lowering: Module(lowering.codegen()[0].value))
        yield


def _note(events: list[str], graph: torch.fx.Graph) -> None:
    events.append("user")


def compiled(model: nn.Module, **options: Any) -> Compiled:
    found = Compiled()
    torch._dynamo.reset()
    options = {"hardware": SLOW, "memory_budget": "unlimited", **options}
    call = torch.compile(model, backend="overlap", fullgraph=True, options=options)
    with generated_code(found), pytest.raises(GeneratedOnly):
        call(tokens(model.config, seed=0))
    return found


def llama(blocks: int = 1, **options: Any) -> TinyLlama:
    return sharded_llama(TinyLlamaConfig(blocks=blocks), **options)


# -- tokens


def planned_tokens(program: Program, order: Sequence[str]) -> list[str]:
    found, numbers = [], {}
    for op in map(program.op, order):
        if op.kind is OpKind.LAUNCH:
            numbers[op.name] = len(numbers)
            found.append(f"{LAUNCH} {numbers[op.name]} {op.collective.kind}")
        elif op.kind is OpKind.WAIT:
            found.append(f"{WAIT} {numbers[op.launch]}")
        elif op.category is Category.MATMUL:
            found.append(MATMUL)
        elif op.category is Category.ATTENTION:
            found.append(ATTENTION)
    return found


LAUNCHED = re.compile(
    r"(?:(\w+) = )?torch\.ops\.(?:_c10d_functional|overlap_pass)\."
    r"(all_gather|reduce_scatter|all_reduce|gather_start|exchange_start)\w*\.default\((\w+)?"
)
"""An all-reduce in place returns nothing: it is waited for by the name of its input."""
OURS = {"gather_start": "all_gather", "exchange_start": "reduce_scatter"}
PART = re.compile(r"(\w+) = (\w+)(?:\[\d+\])?$")
WAITED = re.compile(
    r".*torch\.ops\.(?:_c10d_functional\.wait_tensor|overlap_pass\.exchange_finish)\.default\((\w+)[,)]"
)
MULTIPLIED = re.compile(r"extern_kernels\.(mm|addmm|bmm|baddbmm)\(")
ATTENDED = re.compile(r"= torch\.ops\.aten\._scaled_dot_product\w*\.default\(")


def code_tokens(code: str) -> list[str]:
    found: list[str] = []
    numbers: dict[str, int] = {}
    launches = 0
    for line in map(str.strip, code.splitlines()):
        if match := LAUNCHED.match(line):
            numbers[match[1] or match[3]] = launches
            found.append(f"{LAUNCH} {launches} {OURS.get(match[2], match[2])}")
            launches += 1
        elif match := WAITED.match(line):
            found.append(f"{WAIT} {numbers[match[1]]}")
        elif (match := PART.match(line)) and match[2] in numbers:
            numbers[match[1]] = numbers[match[2]]
        elif MULTIPLIED.match(line):
            found.append(MATMUL)
        elif ATTENDED.search(line):
            found.append(ATTENTION)
    return found


# -- tests

CASES: dict[str, tuple[Callable[[], TinyLlama], dict[str, Any]]] = {
    "fp32": (lambda: llama(2, reshard_after_forward=True), {}),
    "bf16, a launch for each parameter": (lambda: llama(mp_policy=BF16), {"coalesce": "off"}),
    "bf16, coalesced launches": (lambda: llama(mp_policy=BF16), {"coalesce": 4096}),
    "copies and exchanges": (
        lambda: llama(mp_policy=BF16),
        {"coalesce": 4096, "transport": "copy_engine", "reduction": "exchange"},
    ),
    "exchanges, a launch for each parameter": (
        lambda: llama(mp_policy=BF16),
        {"coalesce": "off", "transport": "copy_engine", "reduction": "exchange"},
    ),
    "two communicators, one at a time": (
        lambda: llama(mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))),
        {"coalesce": 4096, "communicators_in_flight": 1},
    ),
    "gathered once": (lambda: llama(reshard_after_forward=False), {"coalesce": "off"}),
}


@dataclass(frozen=True)
class Session:
    """All cases, and torch's whole configuration before the first of them and after the last."""

    compiled: dict[str, Compiled]
    before: dict[str, Any]
    after: dict[str, Any]


@pytest.fixture(scope="module")
def session() -> Session:
    before = configuration()
    with fake_ranks(8):
        found = {name: compiled(build(), **options) for name, (build, options) in CASES.items()}
    return Session(found, before, configuration())


def configuration() -> dict[str, Any]:
    modules = (inductor_config, dynamo_config, functorch_config)
    return {f"{module.__name__}.{name}": value for module in modules for name, value in _settings(module).items()}


def _settings(module: Any) -> dict[str, Any]:
    return module.save_config_portable() if hasattr(module, "save_config_portable") else module.shallow_copy_dict()


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("case", CASES)
def test_the_generated_code_runs_in_the_planned_order(case: str, phase: Phase, session: Session) -> None:
    found = session.compiled[case]
    _, plan, code = found.graph(phase)
    order = found.orders[found.plans.index(plan)]
    assert sorted(order) == sorted(plan.schedule.order)
    assert code_tokens(code) == planned_tokens(plan.program, order)


@pytest.mark.parametrize("case", CASES)
def test_only_sums_may_move_behind_the_plan_and_only_to_earlier_places(case: str, session: Session) -> None:
    found = session.compiled[case]
    for plan, order in zip(found.plans, found.orders, strict=True):
        sums = {op.name for op in plan.program.ops if "exchange_finish" in op.target}
        assert [n for n in order if n not in sums] == [n for n in plan.schedule.order if n not in sums]
        planned = {name: place for place, name in enumerate(plan.schedule.order)}
        behind = {name: {n for n in order[:place] if n not in sums} for place, name in enumerate(order) if name in sums}
        assert all(planned[before] < planned[name] for name, earlier in behind.items() for before in earlier)


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("case", CASES)
def test_that_order_is_not_the_one_as_written(case: str, phase: Phase, session: Session) -> None:
    """Otherwise the test above would show that Inductor keeps its own order."""
    program, plan, _ = session.compiled[case].graph(phase)
    assert planned_tokens(plan.program, plan.schedule.order) != planned_tokens(program, program.order)


STARTED = re.compile(r"(\w+) = torch\.ops\.overlap_pass\.exchange_start\w*\.default\((\[.*?\]|\w+), '")
FINISHED = re.compile(r".*torch\.ops\.overlap_pass\.exchange_finish\.default\((\w+), (\w+), '")
PICKED = re.compile(r"(\w+) = (\w+)(?:\[(\d+)\])?$")


def exchanged(code: str) -> list[tuple[str, str]]:
    """For each sum: the buffer that was sent, and the one that is kept until then."""
    sent: dict[str, list[str]] = {}
    found = []
    for line in map(str.strip, code.splitlines()):
        if match := STARTED.match(line):
            sent[match[1]] = match[2].strip("[]").split(", ")
        elif (match := PICKED.match(line)) and match[2] in sent:
            buffers = sent[match[2]]
            sent[match[1]] = buffers if match[3] is None else [buffers[int(match[3])]]
        elif match := FINISHED.match(line):
            (buffer,) = sent[match[1]]
            found.append((buffer, match[2]))
    return found


@pytest.mark.parametrize("case", [case for case in CASES if "exchanges" in case])
def test_the_buffer_that_is_sent_is_the_one_that_is_kept_until_the_sum(case: str, session: Session) -> None:
    """Another one would leave the memory that is being read to the next kernel."""
    _, plan, code = session.compiled[case].graph(Phase.BACKWARD)
    pairs = exchanged(code)
    waits = [op for op in plan.program.ops if op.kind is OpKind.WAIT and "exchange_finish" in op.target]
    assert len(pairs) == len(waits) > 0
    assert [pair for pair in pairs if pair[0] != pair[1]] == []


def test_launches_are_coalesced_where_that_is_asked_for(session: Session) -> None:
    _, plan, code = session.compiled["bf16, coalesced launches"].graph(Phase.BACKWARD)
    assert plan.coalesced
    assert code.count("_coalesced.default(") == len(plan.coalesced)


def test_parameters_are_gathered_again_in_backward_and_not_saved(session: Session) -> None:
    """ZeRO-3, in the graphs that Inductor schedules."""
    forward, backward = (session.compiled["fp32"].graph(phase)[0] for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert saved_gathers(forward) == set()
    weights = {
        name for name in gathered(forward) if "norm" not in name and "embedding" not in name and "bias" not in name
    }
    assert len(weights) == 15
    assert weights <= gathered(backward)


def test_parameters_that_are_to_stay_are_saved_and_not_gathered_again(session: Session) -> None:
    forward, backward = (session.compiled["gathered once"].graph(phase)[0] for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert gathered(backward) == set()
    assert "blocks.0.feed_forward.up.weight" in saved_gathers(forward)


@pytest.mark.parametrize("case", CASES)
def test_the_users_own_pass_runs_before_ours(case: str, session: Session) -> None:
    assert session.compiled[case].events == ["user", "plan"] * 2


def test_torchs_configuration_is_what_it_was(session: Session) -> None:
    changed = {name for name, value in session.before.items() if session.after[name] != value}
    assert changed == set()
    assert len(session.before) > 100


def gathered(program: Program) -> set[str]:
    """Names of the parameters that a graph gathers."""
    found = (op.collective for op in program.launches if op.collective.role is Role.PARAMETER)
    return {collective.parameter for collective in found}


def saved_gathers(program: Program) -> set[str]:
    """Names of the parameters that a graph gathers and hands out, under whatever view."""
    memory = {
        storage: op.collective.parameter
        for op in program.launches
        if op.collective.role is Role.PARAMETER
        for storage in op.storages
    }
    results = (program.op(name) for name in program.ops[-1].inputs)
    return {memory[storage] for op in results for storage in op.storages if storage in memory}
