"""``reshard="auto"``: numbers are those of eager FSDP2 whatever stays for the backward, and what was foreseen is what is cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import overlap_pass
from compile_backends import compilation
from overlap_pass.cli.main import main
from overlap_pass.config import Config
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import OptionError
from overlap_pass.graph.program import CollectiveKind, Phase, Program
from overlap_pass.memory.budget import Absolute, Beside, Budget
from overlap_pass.memory.ledger import peak, resident_bytes
from overlap_pass.profiling import llama, trace_plan
from overlap_pass.rewrite.reshard import PartitionByBudget
from overlap_pass.schedule.kept import gathered_twice, keep_in_backward, keep_in_forward
from overlap_pass.transport.choice import Carriers
from tests.cpu.models import sharded_llama
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.test_fsdp_numerics import BF16, columns
from tests.cpu.training import Recipe, compare

H100 = load_hardware("h100")


class Noted:
    """The backend ``overlap_eager`` with options, and the launches of its plans."""

    def __init__(self, **options: Any) -> None:
        self.options, self.plans = options, []

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        from compile_backends.eager import lower

        state = compilation.Compilation.begin(gm, Config.from_options(self.options))
        self.plans = state.plans
        return lower(gm, inputs, state)


def check(budget: str, **sharding: Any) -> tuple[list[str], int, list[int], list[str]]:
    backend = Noted(reshard="auto", memory_budget=budget)
    wrong, nonzero = compare(partial(sharded_llama, **sharding), Recipe(steps=2), backend)
    kinds = [[op.collective.kind for op in plan.program.launches] for plan in backend.plans]
    gathers = [found.count(CollectiveKind.ALL_GATHER) for found in kinds]
    return wrong, nonzero, gathers, [plan.skeleton for plan in backend.plans]


CASES = {
    "all kept": partial(check, "unlimited"),
    "some kept": partial(check, "+8KiB", mp_policy=BF16),
    "by columns": partial(check, "fsdp2+16KiB", shard_placement_fn=columns),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(CASES, ranks=2, limit_s=600)


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_of_eager_fsdp2(case: str, outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[case].values()
    for wrong, nonzero, _, _ in (first, second):
        assert wrong == []
        assert nonzero > 0
    assert first[2:] == second[2:], "both ranks decide alike"


def test_less_is_gathered_again_the_more_is_allowed(outcomes: dict[str, Outcome]) -> None:
    again = {case: outcomes[case].values()[0][2][1] for case in CASES}
    assert again["all kept"] == 0
    assert 0 < again["some kept"] < outcomes["some kept"].values()[0][2][0]


def traced(budget: str) -> tuple[tuple[Program, ...], PartitionByBudget]:
    by_budget = PartitionByBudget(H100, Budget.parse(budget), Carriers("nccl", "ring"))
    build = trace_plan.llama_step("tiny", 64)
    return trace_plan.trace_model(build, world_size=8, cut=by_budget), by_budget


def test_what_is_foreseen_is_what_the_partitioner_makes() -> None:
    """Decided on programs, done by tags: the peaks of the graphs that come out are those that were foreseen."""
    (forward, backward), none = traced("1B")
    assert none.decision.kept == ()
    (first, second), some = traced("+40KiB")
    assert 0 < len(some.decision.kept) < some.decision.gathered
    kept = [gather for gather in gathered_twice(forward, backward) if gather.launch in some.decision.kept]
    foreseen = keep_in_forward(forward, kept), keep_in_backward(backward, kept)
    assert peak(first).peak_bytes == peak(foreseen[0]).peak_bytes
    assert peak(second).peak_bytes == peak(foreseen[1]).peak_bytes
    assert {op.name for op in second.launches} == {op.name for op in foreseen[1].launches}
    assert resident_bytes(first, second) == resident_bytes(*foreseen)


def test_the_command_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny", "--tokens", "64", "--reshard", "auto", "--budget", "+40KiB", "--json"]) == 0
    printed = capsys.readouterr().out
    assert "gathered parameters stay from forward to backward" in printed
    assert "attention_norm.weight" in printed


def test_a_partitioner_of_the_users_and_auto_exclude_each_other() -> None:
    from compile_backends.inductor import lower

    gm = torch.fx.symbolic_trace(nn.Linear(2, 2))
    state = compilation.Compilation.begin(gm, Config.from_options({"reshard": "auto"}))
    with (
        inductor_config.patch(custom_partitioner_fn=object()),
        pytest.raises(OptionError, match="custom_partitioner_fn"),
    ):
        lower(gm, [torch.zeros(2, 2)], state)


def test_the_backward_counts_what_only_the_forward_names() -> None:
    comparison = overlap_pass.plan(
        trace_plan.llama_step("tiny", 64), world_size=8, options={"reshard": "auto", "memory_budget": "unlimited"}
    )
    shape = llama.preset("tiny")
    assert comparison.after.peak_bytes > 4 * shape.vocab_size * shape.dim // 8
    (forward, backward), _ = traced("unlimited")
    assert backward.phase is Phase.BACKWARD
    assert comparison.before.peak_bytes == max(
        peak(forward).peak_bytes, peak(backward, resident_bytes=resident_bytes(forward, backward)).peak_bytes
    )
    assert Beside(Absolute(5), 3).resolve(backward, 0) == 5


def test_what_copies_keep_for_themselves_is_in_the_budget_that_decides() -> None:
    options = {"reshard": "auto", "transport": "copy_engine", "memory_budget": "fsdp2"}
    comparison = overlap_pass.plan(trace_plan.llama_step("tiny", 64), world_size=2, options=options)
    assert comparison.after.peak_bytes <= comparison.budget_bytes
