"""``torch.compile`` with one of our backends converts a ``fully_shard`` model first; with any other it does not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlap_pass
from overlap_pass.errors import ConversionError, OptionError, UncapturedCollectives
from overlap_pass.fsdp.autoconvert import ENVIRONMENT, install
from overlap_pass.fsdp.discover import live_fsdp_source
from tests.cpu.models import TinyLlama, TinyLlamaConfig, sharded_llama, tokens
from tests.cpu.ranks import fake_ranks

CONFIG = TinyLlamaConfig(blocks=1)


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


@pytest.fixture(autouse=True)
def torch_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test wraps a torch of its own, even if a backend has been loaded before."""
    monkeypatch.setattr(torch._dynamo, "optimize", torch._dynamo.eval_frame.optimize)
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    torch._dynamo.reset()


class Backend:
    """A backend that runs graphs as they are and remembers them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []
        self.options: list[Any] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor], *, options: Any = None) -> Any:
        self.graphs.append(gm)
        self.options.append(options)
        return gm.forward

    @property
    def gathers(self) -> int:
        return sum("gather" in str(node.target) for gm in self.graphs for node in gm.graph.nodes)


def llama() -> TinyLlama:
    return sharded_llama(CONFIG, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def batch() -> Tensor:
    return tokens(CONFIG, seed=0)


def test_a_compiled_model_is_converted_before_it_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    model = llama()
    with caplog.at_level(logging.INFO, logger="overlap_pass"):
        compiled = torch.compile(model, backend=ours, fullgraph=True)
    assert overlap_pass.is_traceable(model)
    compiled(batch())
    assert [len(ours.graphs), ours.gathers] == [1, 13]
    (record,) = [record for record in caplog.records if record.name == "overlap_pass"]
    assert record.levelno == logging.INFO
    for fact in ("TinyLlama", "2 units", "13 parameters", "as bfloat16", "4 ranks", "as float32", ENVIRONMENT):
        assert fact in record.getMessage()


def test_a_models_own_compile_method_converts_it() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    model = llama()
    model.compile(backend=ours, fullgraph=True)
    model(batch())
    assert [len(ours.graphs), ours.gathers] == [1, 13]


def test_the_decorator_form_converts_and_the_options_reach_the_backend() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    options = {"fsdp": "auto", "other": 1}
    torch.compile(backend=ours, fullgraph=True, options=options)(llama())(batch())
    assert ours.gathers == 13
    assert ours.options == [options]


def test_other_backends_never_notice() -> None:
    ours, theirs = Backend(), Backend()
    install(lambda backend: backend is ours)
    model = llama()
    torch.compile(model, backend=theirs)(batch())
    assert not overlap_pass.is_traceable(model)
    assert theirs.gathers == 0


def test_arguments_reach_torch_as_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, seen = Backend(), []

    def optimize(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return lambda target: target

    monkeypatch.setattr(torch._dynamo, "optimize", optimize)
    install(lambda backend: backend is ours)
    function = batch
    assert torch._dynamo.optimize("eager", nopython=True, a_newer_keyword=3)(function) is function
    assert torch._dynamo.optimize(ours, nopython=True)(function) is function
    assert seen == [(("eager",), {"nopython": True, "a_newer_keyword": 3}), ((ours,), {"nopython": True})]


def test_torch_is_wrapped_once_and_the_last_check_counts() -> None:
    first, second = Backend(), Backend()
    install(lambda backend: backend is first)
    wrapped = torch._dynamo.optimize
    install(lambda backend: backend is second)
    assert torch._dynamo.optimize is wrapped
    model = llama()
    torch.compile(model, backend=first)
    assert not overlap_pass.is_traceable(model)
    torch.compile(model, backend=second)
    assert overlap_pass.is_traceable(model)


def test_the_environment_switches_the_conversion_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    monkeypatch.setenv(ENVIRONMENT, "0")
    model = llama()
    torch.compile(model, backend=ours, options={"fsdp": "auto"})
    assert not overlap_pass.is_traceable(model)


def test_the_option_switches_the_conversion_off_or_makes_it_an_error() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    model = llama()
    torch.compile(model, backend=ours, options={"fsdp": "off"})
    assert not overlap_pass.is_traceable(model)
    with pytest.raises(
        UncapturedCollectives, match=r"call overlap_pass\.make_traceable\(model\) before torch\.compile"
    ):
        torch.compile(model, backend=ours, options={"fsdp": "error"})
    assert not overlap_pass.is_traceable(model)
    overlap_pass.make_traceable(model)
    torch.compile(model, backend=ours, options={"fsdp": "error"})


def test_an_unknown_mode_names_the_known_ones() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    with pytest.raises(OptionError, match=r"fsdp='on' is no mode: use one of 'auto', 'off', 'error'"):
        torch.compile(llama(), backend=ours, options={"fsdp": "on"})


def test_a_disabled_compile_converts_nothing() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    model = llama()
    torch.compile(model, backend=ours, disable=True)
    assert not overlap_pass.is_traceable(model)


def test_plain_modules_and_functions_are_left_alone() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    plain = nn.Linear(2, 2)
    torch.compile(plain, backend=ours)(torch.ones(1, 2))
    torch.compile(torch.sin, backend=ours)(torch.ones(2))
    assert type(plain) is nn.Linear


def test_a_model_that_cannot_be_converted_is_an_error_where_it_is_compiled() -> None:
    ours = Backend()
    install(lambda backend: backend is ours)
    model = llama()
    model.set_all_reduce_hook(lambda output: None)
    with pytest.raises(ConversionError, match="the root module: has an all-reduce hook"):
        torch.compile(model, backend=ours)


@pytest.mark.parametrize("closure", [True, False])
def test_live_hooks_behind_a_function_are_recognised_in_the_graph(closure: bool) -> None:
    """A function that closes over the model cannot be seen through; its graphs can."""
    found: list[str | None] = []

    def look(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.append(live_fsdp_source(gm))
        return gm.forward

    model = llama()
    compiled = torch.compile((lambda ids: model(ids)) if closure else model, backend=look)
    compiled(batch())
    # Of the block's frame; the frame of the root's norm and head may come too.
    assert "self.attention_norm" in found


def test_graphs_of_converted_and_of_plain_models_have_no_live_hooks() -> None:
    found: list[str | None] = []

    def look(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        found.append(live_fsdp_source(gm))
        return gm.forward

    torch.compile(overlap_pass.make_traceable(llama()), backend=look, fullgraph=True)(batch())
    torch.compile(TinyLlama(CONFIG), backend=look, fullgraph=True)(batch())
    assert found == [None, None]
