"""Plans that are saved and run again, through ``torch.compile``: the same launches and bits, or an error that says what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard

from compile_backends import compilation
from overlap_pass.errors import PlanError
from overlap_pass.planning import Plan
from tests.cpu.ranks import Outcome, fake_ranks, run_cases
from tests.cpu.test_backend_numerics import SLOW, STACK, stack
from tests.cpu.training import Training, adamw, differences, train

SEARCHED = {"strategy": "local_search{evaluations=20}", "memory_budget": "unlimited", "hardware": SLOW}


def planned(step: Callable[[], Any], name: str) -> list[Plan]:
    """What ``make_plan`` or ``replay`` returned meanwhile."""
    found: list[Plan] = []
    original = getattr(compilation, name)

    def watched(*args: Any, **options: Any) -> Plan:
        found.append(original(*args, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation, name, watched)
        step()
    return found


# -- two ranks, whose shards are uneven


def saved_and_run_again(folder: Path) -> tuple[list[str], list[str], list[str], list[str]]:
    """Differences of both runs to eager FSDP2, and hashes of what each launched."""
    reference = stack(blocks=2)
    expected = train(reference, adamw(reference), STACK)
    found: list[Training] = []
    saved = planned(lambda: found.append(trained(save_plan=folder, **SEARCHED)), "make_plan")
    again = planned(lambda: found.append(trained(plan=folder, memory_budget="unlimited")), "replay")
    hashes = ([plan.skeleton for plan in plans] for plans in (saved, again))
    return (*(differences(expected, training) for training in found), *hashes)


def trained(**options: Any) -> Training:
    torch._dynamo.reset()
    model = stack(blocks=2)
    optimizer = adamw(model)
    call = torch.compile(model, backend="overlap_eager", fullgraph=True, options=options)
    return train(model, optimizer, STACK, call=call)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_cases({"again": partial(saved_and_run_again, tmp_path_factory.mktemp("runs") / "plans")}, ranks=2)


def test_a_saved_plan_launches_as_the_run_that_saved_it_and_computes_the_same_bits(
    outcomes: dict[str, Outcome],
) -> None:
    first, second = outcomes["again"].values()
    for wrong_saving, wrong_again, saved, again in (first, second):
        assert wrong_saving == wrong_again == []
        assert saved == again
        assert len(saved) == 2
    assert first[3] == second[3], "and both ranks launch alike"


# -- one process


def step(backend: str, rows: int = 3, **options: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)))
    call = torch.compile(model, backend=backend, fullgraph=True, dynamic=False, options=options)
    call(torch.ones(rows, 4)).sum().backward()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fresh_cache(), fake_ranks(2):
        yield


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
def test_both_lowerings_save_and_run_again(backend: str, tmp_path: Path) -> None:
    saved = planned(lambda: step(backend, save_plan=tmp_path, **SEARCHED), "make_plan")
    again = planned(lambda: step(backend, plan=tmp_path, memory_budget="unlimited"), "replay")
    assert [plan.schedule.order for plan in saved] == [plan.schedule.order for plan in again]
    assert [plan.schedule.strategy for plan in again] == [SEARCHED["strategy"]] * 2
    assert all(any("a saved one" in note for note in plan.notes) for plan in again)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0-of-2.json"]


@pytest.mark.usefixtures("two_ranks")
def test_graphs_that_were_not_saved_are_refused_and_can_be_added(tmp_path: Path) -> None:
    step("overlap_eager", save_plan=tmp_path)
    with pytest.raises(BackendCompilerFailed) as raised:
        step("overlap_eager", rows=5, plan=tmp_path)
    assert isinstance(raised.value.inner_exception, PlanError)
    assert "the saved plans are of other graphs: forward" in str(raised.value)
    step("overlap_eager", rows=5, save_plan=tmp_path)
    for rows in (3, 5):
        assert len(planned(partial(step, "overlap_eager", rows=rows, plan=tmp_path), "replay")) == 2


def test_a_plan_for_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with fake_ranks(2):
        step("overlap_eager", save_plan=tmp_path)
    with (
        fake_ranks(4),
        pytest.raises(BackendCompilerFailed, match=r"rank-0-of-4.json.*other numbers of ranks: rank-0-of-2"),
    ):
        step("overlap_eager", plan=tmp_path)


@pytest.mark.usefixtures("two_ranks")
def test_another_saved_plan_is_another_entry_of_the_compile_caches(tmp_path: Path) -> None:
    for name, strategy in (("one", "as_written"), ("other", "backward_pre")):
        step("overlap", save_plan=tmp_path / name, strategy=strategy, memory_budget="unlimited")
    counts = [
        len(planned(partial(step, "overlap", plan=tmp_path / name, memory_budget="unlimited"), "replay"))
        for name in ("one", "one", "other")
    ]
    assert counts == [2, 0, 2]
