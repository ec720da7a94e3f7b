"""``verify="first_steps"``: a fixed pattern of calls, one decision on all ranks, the numbers of a run without it."""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compile_backends import first_steps
from compile_backends.first_steps import PATTERN, FirstSteps, groups_of
from overlap_pass.config import Config
from overlap_pass.errors import OptionError
from tests.cpu.ranks import run_cases

BEHIND = 4
"""Steps that are run after the decision."""


class _Told:
    """A clock that says what it is told: microseconds of a call as written and as scheduled."""

    def __init__(self, written_us: float, scheduled_us: float) -> None:
        self.device = torch.device("cpu")
        self.marks = 0
        self._times_us = (written_us, scheduled_us)

    def mark(self) -> None:
        self.marks += 1

    def durations_us(self) -> list[float]:
        # What does not count is as long as compiling is.
        return [self._times_us[which] if counts else 1e9 for which, counts in PATTERN][: self.marks - 1]


def _ran(monkeypatch: Any, told: _Told, groups: tuple[Any, ...] = ()) -> str:
    """Which lowering each of the calls ran, as letters."""
    monkeypatch.setattr(first_steps, "Clock", lambda device: told)
    ran: list[str] = []
    both = FirstSteps(lambda x: ran.append("W"), lambda x: ran.append("S"), groups)
    for _ in range(len(PATTERN) + BEHIND):
        both(torch.zeros(1))
    return "".join(ran)


def test_the_calls_alternate_in_blocks_and_the_faster_one_stays(monkeypatch) -> None:
    pattern = "WWWSSS" + 2 * "WWWSSSSSSWWW"
    assert _ran(monkeypatch, _Told(100.0, 90.0)) == pattern + BEHIND * "S"
    assert _ran(monkeypatch, _Told(90.0, 100.0)) == pattern + BEHIND * "W"


def test_without_a_gain_the_order_as_written_stays(monkeypatch) -> None:
    assert _ran(monkeypatch, _Told(100.0, 100.0)).endswith(BEHIND * "W")


def test_both_are_counted_equally_often_and_neither_from_a_blocks_first_call() -> None:
    counted = [which for which, counts in PATTERN if counts]
    assert counted.count(0) == counted.count(1) == 8
    for before, (which, counts) in pairwise(PATTERN):
        assert not (counts and before[0] != which)


def test_only_known_values_are_accepted() -> None:
    with pytest.raises(OptionError, match="verify='always' is not accepted"):
        Config.from_options({"verify": "always"})


def test_as_written_takes_back_what_changes_a_graph_and_nothing_else() -> None:
    given = {"memory_budget": "2GiB", "hardware": "h200", "reshard": "auto", "verify": "first_steps", "fsdp": "off"}
    written = Config.from_options(given).as_written()
    same = {"memory_budget": "2GiB", "hardware": "h200", "fsdp": "off"}
    plain = {"strategy": "as_written", "coalesce": "off", "transport": "nccl", "reduction": "ring"}
    assert written.digest == Config.from_options({**same, **plain}).digest
    assert written.verify == "off"


# On two ranks


def decided_on_two_clocks() -> str:
    """Rank 0 finds the schedule twice as fast, rank 1 three times as slow."""
    times = (100.0, 50.0) if dist.get_rank() == 0 else (100.0, 300.0)
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _ran(monkeypatch, _Told(*times), (dist.group.WORLD,))


def trained(options: dict[str, Any], steps: int) -> tuple[list[float], torch.Tensor, list[str]]:
    """Losses and a gradient of training steps, and what was logged."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("overlap_pass")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(*(fully_shard(nn.Linear(8, 8)) for _ in range(2)), nn.Tanh())
        fully_shard(model)
        compiled = torch.compile(model, backend="overlap_eager", options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(steps):
            optimizer.zero_grad()
            torch.manual_seed(10 * number + dist.get_rank())
            loss = compiled(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        gradient = next(model.parameters()).grad
        return losses, gradient.to_local(), [message for message in messages if "first_steps" in message]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def groups_of_a_mesh() -> list[list[int]]:
    """Of a model on a mesh of two dimensions, one of which has one rank."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    found = groups_of([torch.zeros(1), *model.parameters(), 3])
    return [dist.get_process_group_ranks(group) for group in found]


STEPS = len(PATTERN) + BEHIND
CASES = {
    "clocks": decided_on_two_clocks,
    "groups": groups_of_a_mesh,
    "plain": partial(trained, {}, STEPS),
    "verified": partial(trained, {"verify": "first_steps"}, STEPS),
}


@pytest.fixture(scope="module")
def outcomes():
    return run_cases(CASES, ranks=2)


def test_ranks_whose_clocks_disagree_decide_by_the_slowest(outcomes) -> None:
    first, second = outcomes["clocks"].values()
    assert first == second
    assert first.endswith(BEHIND * "W")


def test_the_agreement_goes_over_the_groups_of_the_parameters_mesh(outcomes) -> None:
    assert outcomes["groups"].values() == ([[0, 1]], [[0, 1]])


def test_training_gives_the_same_bits_and_says_once_what_it_chose(outcomes) -> None:
    for plain, verified in zip(outcomes["plain"].values(), outcomes["verified"].values(), strict=True):
        assert verified[0] == plain[0]
        assert torch.equal(verified[1], plain[1])
        assert plain[2] == []
        assert len(verified[2]) == 1
    choices = {messages[0].rpartition(" as ")[2] for _, _, messages in outcomes["verified"].values()}
    assert len(choices) == 1, "both ranks went on with the same order"
