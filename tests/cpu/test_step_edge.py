"""Gathers across the step's edge: every bit of a loop with ``optimizer.step()``, and nothing stale, whatever is done in between.

Two gloo ranks train one model again and again from the same start, with ``optimizer.step()`` and with
``StepEdge.step()``. How many gathers were taken is counted where they are checked.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from overlap_pass.errors import TransportError
from overlap_pass.fsdp.edge import StepEdge
from overlap_pass.profiling.numbers import reproducible
from overlap_pass.transport import ahead
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.step_edge_loop import LAUNCHES, ROOMY, Loop, adamw, local, looking_up, loss_of, taken
from tests.cpu.test_backend_numerics import watched_plans

# -- what is done between a step and the next forward


def all_scaled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def one_scaled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    next(model.parameters()).detach().mul_(0.5)


def one_local_part_scaled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    next(model.parameters()).to_local().detach().mul_(0.5)


def all_loaded(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def stepped_again(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """As ``foreach`` steps change no version, only the optimizer's hook can tell."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def other_shapes(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A graph of its own, which takes what is under way; the training step behind it launches for itself."""
    loss_of(model, step, rows=2).backward()
    optimizer.zero_grad()


def dropped(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    next(model.parameters()).data.mul_(0.5)
    for way in list(ahead._under_way):
        ahead.drop(way.owner)


LOOPS = {
    "nothing": Loop(),
    "everything": Loop(steps=5, micro_batches=2, clip=1e-2, evaluate=True),
    "foreach": Loop(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)),
    "whole": Loop(whole=True),
    "foreach again": Loop(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, foreach=True), between=stepped_again
    ),
    **{
        between.__name__: Loop(between=between)
        for between in (all_scaled, one_scaled, one_local_part_scaled, all_loaded, stepped_again, other_shapes, dropped)
    },
}


def loops() -> dict[str, tuple[int, int]]:
    """Of each loop, how many results differ in a bit, and how many gathers were taken."""
    model = looking_up()
    call = torch.compile(model, backend="overlap_eager", fullgraph=True, options=ROOMY)
    start = {name: value.clone() for name, value in call.state_dict().items()}
    found = {}
    for name, loop in LOOPS.items():
        call.load_state_dict(start)
        expected, _ = loop.run(call, edge=False)
        call.load_state_dict(start)
        results, count = loop.run(call, edge=True)
        found[name] = (sum(not torch.equal(*pair) for pair in zip(expected, results, strict=True)), count)
    return found


def after_writes() -> list[tuple[str, int]]:
    """Writes that change no version are refused where the gather is taken: what is said, and what was held before."""
    call = torch.compile(looking_up(), backend="overlap_eager", fullgraph=True, options=ROOMY)
    optimizer = adamw(call)
    edge = StepEdge(call, optimizer)
    loss_of(call, 0).backward()
    found = []
    for write in (lambda weight: weight.data.mul_(0.5), lambda weight: torch._foreach_mul_([weight], 0.5)):
        edge.step()
        held = edge.under_way_bytes
        with torch.no_grad():
            write(next(call.parameters()))
        try:
            loss_of(call, 1)
        except TransportError as error:
            found.append((str(error), held))
        edge.drop()
        loss_of(call, 1).backward()
    edge.close()
    return found


def whole_steps_that_are_watched() -> dict[str, tuple[int, str]]:
    """Waits put off by ``step(loss)`` where gradients could be seen before, and what is said where they were."""
    found = {}
    call = torch.compile(looking_up(), backend="overlap_eager", fullgraph=True, options=ROOMY)
    for way in ("nothing", "a gradient", "a hook", "a hook behind", "a copy"):
        optimizer = adamw(call)
        edge = StepEdge(call, optimizer)
        first = next(call.parameters())
        handles = [first.register_hook(lambda gradient: None)] if way == "a hook" else []
        if way == "a hook behind":
            handles = [first.register_post_accumulate_grad_hook(lambda parameter: None)]
        if way == "a gradient":
            loss_of(call, 0).backward()
        if way == "a copy":
            accumulate = first.view_as(first).grad_fn.next_functions[0][0]
            handles = [accumulate.register_prehook(lambda gradients: tuple(one.clone() for one in gradients))]
        before, said = local(first).clone(), ""
        with counted_pending() as pending:
            try:
                edge.step(loss_of(call, 1))
            except TransportError as error:
                said = str(error) if torch.equal(before, local(first)) else "parameters were updated"
        found[way] = (sum(pending), said)
        for handle in handles:
            handle.remove()
        optimizer.zero_grad()
        edge.close()
    return found


@contextmanager
def counted_pending() -> Iterator[list[int]]:
    found: list[int] = []
    original = StepEdge._of_gradients

    def count(edge: StepEdge, pending: list[Tensor]) -> set[int]:
        found.append(len(pending))
        return original(edge, pending)

    with mock.patch.object(StepEdge, "_of_gradients", count):
        yield found


def two_models() -> tuple[int, int]:
    """Models of the same names and shapes, each with an edge: losses that differ from those without, and gathers taken."""
    losses: list[list[Tensor]] = []
    models = [looking_up(), looking_up()]
    calls = [torch.compile(model, backend="overlap_eager", fullgraph=True, options=ROOMY) for model in models]
    with taken() as count:
        for with_edge in (False, True):
            found: list[Tensor] = []
            for scale, model in enumerate(models, 1):
                model.load_state_dict({name: value * scale for name, value in looking_up().state_dict().items()})
            steppers = [StepEdge(model, adamw(model)) if with_edge else adamw(model) for model in models]
            for step in range(3):
                backwards = [loss_of(call, step) for call in calls]
                for loss, stepper, model in zip(backwards, steppers, models, strict=True):
                    loss.backward()
                    stepper.step()
                    model.zero_grad()
                    found.append(loss.detach())
            losses.append(found)
    return sum(not torch.equal(*pair) for pair in zip(*losses, strict=True)), len(count)


def forgotten() -> tuple[int, int]:
    """Bytes held behind a step, and when the edge is gone."""
    model = looking_up()
    edge = StepEdge(model, adamw(model))
    loss_of(torch.compile(model, backend="overlap_eager", fullgraph=True, options=ROOMY), 0).backward()
    edge.step()
    held, owner = edge.under_way_bytes, id(edge)
    del edge
    gc.collect()
    return held, ahead.under_way_bytes(owner)


def replaced() -> tuple[int, int]:
    """Parameters that are assigned anew: the edge's optimizer updates the old ones, as it would without an edge."""
    model = looking_up()
    call = torch.compile(model, backend="overlap_eager", fullgraph=True, options=ROOMY)
    edge = StepEdge(model, adamw(model))
    loss_of(call, 0).backward()
    edge.step()
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)
    with taken() as count:
        found = loss_of(call, 1)
        edge.close()
        expected = loss_of(call, 1)
    return int(not torch.equal(found, expected)), len(count)


def warm_cache() -> tuple[tuple[int, int], list[int], tuple[int, int]]:
    """Without an edge, then cold and warm with one that runs the backward, too: differences, graphs planned so far, gathers taken."""
    planned, results, counts = [], [], []
    with watched_plans() as plans, reproducible():
        for edge in (False, True, True):
            torch._dynamo.reset()
            call = torch.compile(looking_up(MixedPrecisionPolicy()), backend="overlap", fullgraph=True, options=ROOMY)
            found, count = Loop(steps=2, whole=True).run(call, edge=edge)
            planned.append(len(plans))
            results.append(found)
            counts.append(count)
    cold, warm = (sum(not torch.equal(*p) for p in zip(results[0], other, strict=True)) for other in results[1:])
    return (cold, warm), planned, (counts[1], counts[2])


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    with fresh_cache():
        cases = (loops, whole_steps_that_are_watched, two_models, forgotten, replaced, warm_cache, after_writes)
        return run_cases({case.__name__: case for case in cases}, ranks=2)


@pytest.fixture(scope="module")
def results(outcomes: dict[str, Outcome]) -> dict[str, list[tuple[int, int]]]:
    first, second = outcomes["loops"].values()
    return {name: [first[name], second[name]] for name in LOOPS}


@pytest.mark.parametrize("name", ["nothing", "everything", "foreach", "whole"])
def test_a_loop_has_the_same_bits_and_takes_what_is_under_way(results, name: str) -> None:
    for differing, count in results[name]:
        assert differing == 0
        assert count == LAUNCHES * (LOOPS[name].steps - 1)


@pytest.mark.parametrize("name", ["one_scaled", "one_local_part_scaled"])
def test_one_parameter_that_is_written_in_between_is_gathered_again_and_the_others_are_not(results, name: str) -> None:
    for differing, count in results[name]:
        assert differing == 0
        assert 0 < count < LAUNCHES * (LOOPS[name].steps - 1)


@pytest.mark.parametrize("name", ["all_scaled", "all_loaded", "stepped_again", "foreach again", "dropped"])
def test_nothing_is_taken_where_all_parameters_were_written_in_between(results, name: str) -> None:
    assert results[name] == [(0, 0), (0, 0)]


def test_a_batch_of_another_shape_changes_no_bit(results) -> None:
    assert [differing for differing, _ in results["other_shapes"]] == [0, 0]


def test_parameters_that_were_replaced_are_gathered_as_they_are(outcomes) -> None:
    assert outcomes["replaced"].values() == ((0, 0), (0, 0))


def test_a_write_that_changes_no_version_is_an_error_and_no_wrong_number(outcomes) -> None:
    for raised in outcomes["after_writes"].values():
        assert len(raised) == 2
        for message, held in raised:
            assert "call drop() of the StepEdge behind such a write" in message
            assert held > 0


def test_reductions_are_put_off_only_where_nobody_can_look_at_a_gradient_before(outcomes) -> None:
    for found in outcomes["whole_steps_that_are_watched"].values():
        assert found["nothing"] == (1, "")
        for way in ("a gradient", "a hook", "a hook behind"):
            assert found[way] == (0, ""), way
        put_off, said = found["a copy"]
        assert put_off == 1
        assert "a gradient was read before it was reduced" in said


def test_neither_of_two_models_takes_what_was_gathered_for_the_other(outcomes) -> None:
    for differing, count in outcomes["two_models"].values():
        assert differing == 0
        assert count == 2 * LAUNCHES * 2


def test_what_nobody_takes_goes_with_its_edge(outcomes) -> None:
    for held, left in outcomes["forgotten"].values():
        assert held > 0
        assert left == 0


def test_inductor_has_the_same_bits_and_graphs_out_of_a_cache_take_as_well(outcomes) -> None:
    for wrong, planned, counts in outcomes["warm_cache"].values():
        assert wrong == (0, 0)
        assert planned == [2, 4, 4], "the choice is in the key, and what was cached is found again"
        assert counts == (LAUNCHES, LAUNCHES)
