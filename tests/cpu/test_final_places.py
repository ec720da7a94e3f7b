"""Gathered parameters in memory that the ranks share: the same bits through both lowerings, on two gloo ranks.

Off CUDA that memory is a rank's own, but it is one piece, used again as planned: what is gathered too early, or a buffer that
the compiler takes for its own, changes what is still to be read. It is full of NaN before the first step. (What peers may do
to it is tried on imagined devices, in ``test_copy_engine``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx

from compile_backends import compilation
from compile_backends.compilation import Compilation
from overlap_pass.config import Config
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Lease, Phase, Program
from overlap_pass.memory import leases
from overlap_pass.profiling.plans import recorded_plans
from overlap_pass.schedule import alike, leasing
from overlap_pass.transport import collectives
from overlap_pass.transport.choice import Carriers
from overlap_pass.transport.final import Final
from tests.cpu.models import TinyLlamaConfig, sharded_llama
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.test_backend_numerics import BF16, SLOW, no_compile_cache
from tests.cpu.training import Recipe, Training, adamw, differences, train

OPTIONS = {"hardware": SLOW, "transport": "copy_engine", "memory_budget": "unlimited"}
STAGED = OPTIONS | {"final_places": "off"}


@dataclass(frozen=True)
class Found:
    """What differs, and of each plan how many parameters lie in shared memory, and how many launches take others' places."""

    differing: list[str]
    plans: list[tuple[int, int]]


def against(expected: tuple[str, dict[str, Any]] | None, backend: str, options: dict[str, Any]) -> Found:
    with no_compile_cache(), everything_final():
        before = trained(expected)
        with recorded_plans() as plans:
            after = trained((backend, options))
    counts = [list(plan.program.leases.values()) for plan in plans]
    return Found(
        differences(before, after),
        [(sum(sum(one.final) for one in each), sum(bool(one.behind) for one in each)) for each in counts],
    )


def trained(compiled: tuple[str, dict[str, Any]] | None) -> Training:
    torch._dynamo.reset()
    model = sharded_llama(TinyLlamaConfig(blocks=3), mp_policy=BF16)
    optimizer = adamw(model)
    call = model
    if compiled is not None:
        backend, options = compiled
        call = torch.compile(model, backend=backend, fullgraph=True, options=options)
    return train(model, optimizer, Recipe(), call=call)


@contextmanager
def everything_final() -> Iterator[None]:
    """Parameters of any size, also where next to nothing is gained; memory that was never written is NaN."""
    memories: dict[tuple[str, int], Final] = {}

    def imagined(group_name: str, capacity_bytes: int) -> Final:
        key = (group_name, capacity_bytes)
        if key not in memories:
            memories[key] = Final(torch.full((capacity_bytes,), 255, dtype=torch.uint8))
        return memories[key]

    with ExitStack() as stack:
        for where, name, value in (
            (leases, "_LEAST_BYTES", 1),
            (alike, "_WORTH_MEMORY", 0.0),
            (leasing, "_WORTH", 0.0),
            (leasing, "_PAYS", 0.0),
            (collectives, "_imagined", imagined),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield


RUNS: dict[str, Callable[[], Found]] = {
    "eager": partial(against, None, "overlap_eager", OPTIONS),
    "eager, priced": partial(against, None, "overlap_eager", OPTIONS | {"launch_order": "priced"}),
    "eager, one launch a parameter": partial(against, None, "overlap_eager", OPTIONS | {"coalesce": "off"}),
    "inductor": partial(against, ("overlap", STAGED), "overlap", OPTIONS),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2, limit_s=500)


@pytest.mark.parametrize("run", RUNS)
def test_every_bit_is_the_same(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, found in enumerate(outcomes[run].values()):
        assert found.differing == [], f"rank {rank}"


@pytest.mark.parametrize("run", RUNS)
def test_parameters_lie_in_shared_memory(run: str, outcomes: dict[str, Outcome]) -> None:
    first, second = (found.plans for found in outcomes[run].values())
    assert first == second
    assert len(first) == 2
    assert all(final > 0 for final, _ in first)


@pytest.mark.parametrize("run", [run for run in RUNS if "one launch" in run])
def test_they_take_the_places_of_others(run: str, outcomes: dict[str, Outcome]) -> None:
    assert any(displacing > 10 for _, displacing in outcomes[run].values()[0].plans)


def compiling(*, ahead: bool) -> Compilation:
    return Compilation(Config(), SLOW, Carriers(), "", ahead=ahead)


def test_where_a_step_edge_gathers_ahead_nothing_lies_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(compilation, "make_plan", lambda *_, launches: asked.append(launches.final_places))
    for ahead in (False, True):
        compiling(ahead=ahead)._planned(Program("forward", Phase.FORWARD, (), ()))
    assert asked == [True, False]


def test_a_saved_plan_with_final_places_is_refused_beside_a_step_edge() -> None:
    program = Program("forward", Phase.FORWARD, (), ())
    plan: Any = SimpleNamespace(program=replace(program, leases={"gather": Lease(1, 0, 1, (True,), 1)}))
    with pytest.raises(PlanError, match="save it again with the StepEdge"):
        compiling(ahead=True)._across_steps(fx.Graph(), program, plan)
