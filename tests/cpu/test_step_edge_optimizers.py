"""Which optimizers may be stepped in two parts, and that these then round as in one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import overlap_pass
from overlap_pass.errors import ConversionError, OptionError
from overlap_pass.fsdp.edge import SEPARABLE, StepEdge, only
from overlap_pass.profiling.plans import recorded_plans
from overlap_pass.report import jsonfile
from tests.cpu.ranks import fake_ranks


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


def sharded() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))


def made(kind: type[Optimizer], **options: object) -> tuple[Optimizer, list[nn.Parameter]]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, 3)) for size in (1, 4, 2, 5)]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]
    return kind(groups, lr=0.1, **options), parameters  # type: ignore[call-arg]


def gradients(parameters: list[nn.Parameter], step: int) -> list[Tensor | None]:
    """The second parameter has none in the first step, so that states begin at different times."""
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(p.shape, generator=generator) for p in parameters]
    return [None if (number, step) == (1, 0) else gradient for number, gradient in enumerate(found)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", SEPARABLE)
def test_two_parts_give_the_bits_of_one_step(kind: type[Optimizer], foreach: bool) -> None:
    whole, expected = made(kind, foreach=foreach)
    parted, found = made(kind, foreach=foreach)
    first = {id(found[1]), id(found[3])}
    for step in range(4):
        for parameters in (expected, found):
            for parameter, gradient in zip(parameters, gradients(parameters, step), strict=True):
                parameter.grad = gradient
        whole.step()
        for inside in (True, False):
            with only(parted, first, inside=inside):
                parted.step()
        assert [p.grad is None for p in found] == [p.grad is None for p in expected]
    assert all(map(torch.equal, expected, found))
    one, other = whole.state_dict()["state"], parted.state_dict()["state"]
    assert one.keys() == other.keys()
    for number, state in one.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[number][name]))


def test_gradients_are_given_back_where_the_optimizer_raises() -> None:
    optimizer, parameters = made(torch.optim.SGD)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with only(optimizer, {id(parameters[0])}, inside=True):
        assert [p.grad is None for p in parameters] == [False, True, True, True]
    optimizer.step = lambda: 1 // 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), only(optimizer, {id(parameters[0])}, inside=True):
        optimizer.step()
    assert [p.grad is None for p in parameters] == [False] * 4


class Momentum(torch.optim.SGD):
    """What a subclass does in ``step`` nobody knows."""


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Momentum])
def test_an_optimizer_that_may_look_across_parameters_is_refused(kind: type[Optimizer]) -> None:
    model = sharded()
    with pytest.raises(OptionError, match=f"{kind.__name__} is not known to update each from its own gradient"):
        StepEdge(model, kind(model.parameters(), lr=0.1))  # type: ignore[call-arg]
    assert not overlap_pass.is_traceable(model), "refused before anything is changed"


def test_hooks_around_steps_are_refused_when_they_would_run_twice() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    edge = StepEdge(model, optimizer)
    edge.step()
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(OptionError, match="SGD has 1 hooks around its steps, and StepEdge makes several of one"):
        edge.step()


def test_an_optimizer_has_one_edge_at_a_time() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    edge = StepEdge(model, optimizer)
    with pytest.raises(OptionError, match=r"close\(\) a StepEdge that the optimizer has already"):
        StepEdge(model, optimizer)
    edge.close()
    StepEdge(model, optimizer).step()
    edge.step()


def test_a_group_of_which_a_part_could_be_computed_otherwise_is_refused() -> None:
    model = sharded()
    parameters = [*model.parameters(), nn.Parameter(torch.zeros(1, device="meta"))]
    with pytest.raises(OptionError, match=r"param_groups\[0\] of Adam mixes devices"):
        StepEdge(model, torch.optim.Adam(parameters))
    StepEdge(model, torch.optim.Adam(parameters, foreach=False))


def test_a_model_that_cannot_be_captured_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConversionError, match="no module of Linear is under fully_shard"):
        StepEdge(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_edge_that_no_graph_makes_use_of_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = sharded()
    edge = StepEdge(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, "overlap_pass"):
        for _ in range(8):
            edge.step()
    assert [record.message for record in caplog.records if "StepEdge has no effect" in record.message] != []
    assert len(caplog.records) == 1


def test_recorded_graphs_are_refused() -> None:
    model = sharded()
    StepEdge(model, torch.optim.SGD(model.parameters(), lr=0.1))
    call = torch.compile(model, backend="overlap", options={"mode": "reduce-overhead"})
    with pytest.raises(Exception, match="records CUDA graphs, and a StepEdge launches gathers outside of them"):
        call(torch.ones(2, 4))


def test_the_choice_is_in_the_log_and_in_the_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = sharded()
    path = tmp_path / "report.json"
    options = {"report": path, "memory_budget": "unlimited"}
    call = torch.compile(model, backend="overlap_eager", fullgraph=True, options=options)
    StepEdge(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.INFO, "overlap_pass"), recorded_plans() as plans:
        call(torch.ones(2, 4)).sum().backward()
    forward, backward = plans
    said = "gathered across the step's edge: weight"
    assert said in caplog.text
    assert any(said in note for note in jsonfile.loads(path.read_text("utf-8")).notes)
    assert forward.ahead is not None
    assert forward.to_json()["ahead"]["launches"] == forward.ahead.launches
    assert backward.ahead is None


def test_a_whole_step_that_puts_nothing_off_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = sharded()
    edge = StepEdge(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with caplog.at_level(logging.WARNING, "overlap_pass"):
        for _ in range(2):  # the first step leaves gradients behind
            edge.step(model(torch.ones(2, 4)).sum())
        edge.step(model(torch.ones(2, 4)).sum())
    assert sum("waits for all reductions in the backward" in record.message for record in caplog.records) == 1
