"""What a user may get wrong: each gives one line that says what is wrong and what to do, and leaves the model as it was.

What can be known when ``torch.compile`` is called is refused there, before the model is converted. What only the graph can
tell (a budget that is too small, a function that closes over a sharded model) comes out of the first call, where torch
wraps it in a ``BackendCompilerFailed`` whose ``inner_exception`` is ours.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import fully_shard

import overlap_pass
from overlap_pass.errors import (
    ConversionError,
    HardwareError,
    InfeasibleBudget,
    OptionError,
    OverlapPassError,
    UncapturedCollectives,
)
from overlap_pass.registry import registry
from tests.checks.sources import ROOT
from tests.cpu.models import TinyLlama, TinyLlamaConfig, footprint, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks

CONFIG = TinyLlamaConfig(blocks=1)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    with fake_ranks(2):
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def llama() -> TinyLlama:
    return sharded_llama(CONFIG)


def batch() -> Tensor:
    return tokens(CONFIG, seed=0)


def classes(model: nn.Module) -> list[type]:
    """What a conversion would exchange, where torch itself has left other traces on the model."""
    return [type(module) for module in model.modules()]


def one_line(error: BaseException) -> str:
    message = str(error)
    assert "\n" not in message
    return message


# -- refused where torch.compile is called

REFUSED: dict[str, tuple[dict[str, Any], type[OverlapPassError], list[str]]] = {
    "misspelt option": (
        {"memory_budgt": "1GiB"},
        OptionError,
        ["'memory_budgt'", "did you mean 'memory_budget'?"],
    ),
    "unknown option": ({"prefetch": 2}, OptionError, ["'prefetch'", "known: ", "strategy"]),
    "unknown strategy": ({"strategy": "latest_strat"}, OptionError, ["'latest_strat'", "did you mean 'latest_start'?"]),
    "strategy's option": ({"strategy": "latest_start{margn=2}"}, OptionError, ["'margn'", "did you mean 'margin'?"]),
    "unknown hardware": ({"hardware": "h10"}, HardwareError, ["h10", "a100, h100, h200"]),
    "hardware file": ({"hardware": "nowhere.toml"}, HardwareError, ["nowhere.toml"]),
    "negative budget": ({"memory_budget": "-1"}, OptionError, ["memory_budget='-1'", "60GiB"]),
    "negative number": ({"memory_budget": -1}, OptionError, ["memory_budget=-1", "60GiB"]),
    "no size": ({"memory_budget": "2 XB"}, OptionError, ["memory_budget='2 XB'", "60GiB"]),
    "no memory": ({"memory_budget": 0}, OptionError, ["memory_budget=0", "60GiB"]),
    "no page": ({"report": "report.pdf"}, OptionError, ["report='report.pdf'", ".html or .json"]),
    "no folder": (
        {"report": "nowhere/report.html"},
        OptionError,
        ["report='nowhere/report.html'", "no folder 'nowhere'"],
    ),
    "no folder for plans": (
        {"save_plan": "nowhere/plans"},
        OptionError,
        ["save_plan='nowhere/plans'", "no folder 'nowhere'"],
    ),
    "no plans": ({"plan": "nowhere"}, OptionError, ["plan='nowhere' is no folder", "save_plan makes one"]),
    "fsdp": ({"fsdp": "no"}, OptionError, ["fsdp='no'", "auto, error, off"]),
    "no text for a mode": ({"mode": 3}, OptionError, ["mode=3", "'reduce-overhead'"]),
}


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_option_is_refused_before_the_model_is_converted(case: str, backend: str) -> None:
    options, kind, parts = REFUSED[case]
    model = llama()
    before = footprint(model)
    with pytest.raises(kind) as raised:
        torch.compile(model, backend=backend, options=options)
    message = one_line(raised.value)
    assert [part for part in parts if part not in message] == []
    assert footprint(model) == before


@pytest.mark.usefixtures("two_ranks")
def test_a_bad_option_is_refused_in_every_form_of_the_call() -> None:
    model = llama()
    before = footprint(model)
    bad = {"backend": "overlap_eager", "options": {"budget": 1}}
    with pytest.raises(OptionError, match="'budget'"):
        model.compile(**bad)
    with pytest.raises(OptionError, match="'budget'"):
        torch.compile(**bad)(model)
    with pytest.raises(OptionError, match="'budget'"):
        torch.compile(lambda x: model(x), **bad)
    assert footprint(model) == before


@pytest.mark.usefixtures("two_ranks")
def test_a_report_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.mkdir()
    with pytest.raises(OptionError, match=r"report\.html' cannot be written: it is a folder"):
        torch.compile(llama(), backend="overlap_eager", options={"report": page})


@pytest.mark.usefixtures("two_ranks")
def test_a_report_says_which_options_were_in_effect(tmp_path: Path) -> None:
    page = tmp_path / "report.json"
    options = {"report": page, "memory_budget": "+1MiB", "coalesce": "off", "hardware": "a100", "reshard": "auto"}
    torch.compile(llama(), backend="overlap_eager", options=options)(batch()).sum().backward()
    setting = dict(json.loads(page.read_text(encoding="utf-8"))["setting"])
    given = {"hardware": "a100", "memory_budget": "+1MiB", "coalesce": "off", "strategy": "fill_gaps"}
    defaults = {"transport": "auto", "reduction": "auto", "launch_order": "agreed", "fsdp": "auto"}
    assert {name: setting.get(name) for name in (*given, *defaults)} == {**given, **defaults}
    assert setting["reshard"].startswith("auto: ")


@pytest.mark.usefixtures("two_ranks")
def test_a_mode_is_refused_by_the_eager_lowering_and_checked_by_the_other() -> None:
    model = llama()
    before = footprint(model)
    with pytest.raises(OptionError, match="mode='max-autotune' has no effect on backend 'overlap_eager'"):
        torch.compile(model, backend="overlap_eager", mode="max-autotune")
    with pytest.raises(OptionError, match=r"mode='fast' is unknown; torch\.compile's modes are .*max-autotune"):
        torch.compile(model, backend="overlap", mode="fast")
    with pytest.raises(OptionError, match="mode='fast' is unknown"):
        torch.compile(model, backend="overlap", options={"mode": "fast"})
    assert footprint(model) == before


@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
def test_a_world_of_one_rank_is_refused(backend: str) -> None:
    with fake_ranks(1):
        model = llama()
        before = footprint(model)
        with pytest.raises(ConversionError) as raised:
            torch.compile(model, backend=backend)
        message = one_line(raised.value)
        assert "1 rank" in message
        assert "torchrun" in message
        assert footprint(model) == before


@pytest.mark.usefixtures("two_ranks")
def test_options_of_other_backends_are_none_of_our_business() -> None:
    model = llama()
    before = classes(model)
    torch.compile(model, backend="inductor", options={"max_autotune": False})
    assert classes(model) == before


# -- told by the first call


@pytest.mark.usefixtures("two_ranks")
def test_a_budget_that_is_too_small_names_the_smallest_and_that_one_fits() -> None:
    model = llama()
    compiled = torch.compile(model, backend="overlap_eager", options={"memory_budget": "1KiB"})
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(batch())
    inner = raised.value.inner_exception
    assert isinstance(inner, InfeasibleBudget)
    message = one_line(inner)
    assert message in str(raised.value)
    assert "memory_budget of 1.00 KiB" in message
    assert f"smallest budget that fits: {inner.smallest_bytes} bytes" in message
    # The model is as usable as before, compiled or not.
    model(batch()).sum().backward()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend="overlap_eager", options={"memory_budget": inner.smallest_bytes})(batch())


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
def test_a_function_that_closes_over_a_sharded_model_is_told_what_to_call(backend: str) -> None:
    model = llama()
    before = classes(model)
    step = torch.compile(lambda ids: model(ids).sum(), backend=backend)
    with pytest.raises(BackendCompilerFailed) as raised:
        step(batch())
    inner = raised.value.inner_exception
    assert isinstance(inner, UncapturedCollectives)
    message = one_line(inner)
    assert message in str(raised.value)
    assert "Call overlap_pass.make_traceable(model) before torch.compile" in message
    assert classes(model) == before


@pytest.mark.usefixtures("two_ranks")
def test_what_it_is_told_to_call_helps() -> None:
    model = overlap_pass.make_traceable(llama())
    step = torch.compile(lambda ids: model(ids).sum(), backend="overlap_eager", fullgraph=True)
    step(batch()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("two_ranks")
def test_pieces_without_collectives_are_compiled_where_the_user_says_so() -> None:
    model = llama()
    before = classes(model)
    torch.compile(model, backend="overlap_eager", options={"fsdp": "off"})(batch()).sum().backward()
    assert classes(model) == before


# -- nothing to overlap


@pytest.mark.parametrize("gradients", [True, False], ids=["training", "no_grad"])
@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
def test_a_model_without_collectives_is_compiled_in_silence(
    backend: str, gradients: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    x = torch.ones(4, 3)
    expected = model(x).sum()
    with (
        warnings.catch_warnings(),
        caplog.at_level(logging.DEBUG, logger="overlap_pass"),
        torch.set_grad_enabled(gradients),
    ):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")  # what torch says about itself
        found = torch.compile(model, backend=backend)(x).sum()
    assert torch.allclose(found, expected)
    if gradients:
        found.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    assert [record for record in caplog.records if record.name.startswith("overlap_pass")] == []


STRATEGIES = [name for name in registry().names if name != "exact" or find_spec("ortools")]


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_takes_a_backward_that_gathers_nothing(strategy: str) -> None:
    model = fully_shard(nn.Linear(4, 6), reshard_after_forward=False)
    options = {"strategy": strategy}
    torch.compile(model, backend="overlap_eager", options=options)(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- registration

LISTED = """
import sys, torch
print(sorted(set(torch.compiler.list_backends()) & {"overlap", "overlap_eager"}))
print([name for name in sys.modules if name.split(".")[0] in ("overlap_pass", "compile_backends")])
"""


def test_both_backends_are_listed_and_listing_imports_neither() -> None:
    done = subprocess.run([sys.executable, "-c", LISTED], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['overlap', 'overlap_eager']", "[]"]
