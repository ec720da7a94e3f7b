"""Faults that users of similar tools met, tried on ours: ``../shared/scenarios`` beside the checkout, if it is there.

Each test is one scenario, which says itself what is right; the number is that of ``CASES.md`` there. Those that need real
collectives run their parts in one pair of processes (:data:`ON_RANKS`); here they only judge what came back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.checks.sources import ROOT
from tests.cpu import scenarios_adapters as ours
from tests.cpu.ranks import Outcome, fake_ranks, run_cases

pytestmark = pytest.mark.skipif(
    not ours.FOLDER.is_dir(), reason="no scenarios beside the checkout (../shared/scenarios)"
)


@pytest.fixture(scope="module")
def scenarios() -> ModuleType:
    return ours.load("open_cpu")


# -- one process

ON_GRAPHS: dict[str, Any] = {
    "s01": ours.schedule,  # random draws keep their order
    "s06": ours.within_extra_bytes,  # no bound, and a bound of nothing
    "s07": ours.predicted_peak_bytes,  # the peak inside an op
    "s09": ours.within_window,  # so many gathers ahead and no more
    "s12": ours.for_any_rank,  # two communicators over the same ranks
    "s14": ours.schedule,  # symbolic sizes
    "s15": ours.schedule,  # one launch, several waits
    "s20": ours.measured_us,  # merged intervals, odd names
    "s21": ours.simulated_us,  # a communicator runs one collective at a time
    "s24": ours.schedule,  # a view does not pin a wait
}


@pytest.mark.parametrize("name", ON_GRAPHS)
def test_a_graph(name: str, scenarios: ModuleType) -> None:
    getattr(scenarios, name)(ON_GRAPHS[name])


@pytest.mark.parametrize("backend", ["overlap", "overlap_eager"])
def test_s18_a_graph_without_collectives_passes_through(backend: str, scenarios: ModuleType) -> None:
    torch._dynamo.reset()
    scenarios.s18(backend)


def test_s19_no_setting_of_torch_is_left_changed(scenarios: ModuleType) -> None:
    def compile_something() -> None:
        torch._dynamo.reset()
        with fake_ranks(2):
            model = ours.load("common").Shards(0, 2, [8, 8], torch.distributed.group.WORLD.group_name)
            torch.compile(model, backend="overlap", fullgraph=True)(torch.ones(4, 8)).sum().backward()

    scenarios.s19(compile_something)


def test_s17_a_long_graph_is_planned(scenarios: ModuleType) -> None:
    """A hundred layers of 27 ops in a minute at most; ``tests.bench.scale`` measures longer ones."""
    scenarios.s17(ours.schedule, layers=100)


def test_s27_the_order_does_not_depend_on_the_hash_seed(scenarios: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scenarios.s27(f"{ours.__name__}:schedule")


def test_s28_the_predicted_peak_is_the_measured_one(scenarios: ModuleType) -> None:
    scenarios.s28(ours.schedule, ours.predicted_peak_bytes, tol=0.0)


def test_s36_the_only_room_goes_to_the_gather_with_most_to_hide(scenarios: ModuleType) -> None:
    common = ours.load("common")
    small_bytes = 32 * 32 * 4

    def cost_us(node: torch.fx.Node) -> float:
        if node.target in common.STARTS:
            return 35.0 if common.nbytes(node.meta["val"]) > small_bytes else 5.0
        return float(common.mmc(10.0)(node))

    scenarios.s36(ours.priced(cost_us))


# -- two ranks

ON_RANKS: dict[str, tuple[Any, ...]] = {
    "s03": (ours.schedule,),  # a collective that only the other rank reads
    "s05": (ours.for_any_rank,),  # ranks that measure differently
    "s11": (ours.schedule,),  # gathers in bf16 beside gathers in fp32
    "s13": (ours.backend_factory, 3),  # recomputed units
    "s16": (ours.schedule,),  # gathers along another dimension
    "s22": (ours.backend_factory,),  # a graph break between two units
    "s31": (ours.backend_factory,),  # gathered parameters are not saved
    "s32": (ours.backend_factory,),  # two micro-batches, then a step
    "s33": (ours.backend_factory,),  # bit for bit as eager
    "s37": (ours.backend_factory,),  # layers that are skipped
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    parts: dict[str, Callable[[], Any]] = {
        name: partial(ours.rank_part, f"{name}_rank", *doors) for name, doors in ON_RANKS.items()
    }
    for how in ("whole", "block"):
        parts[f"s23 {how}"] = partial(ours.collectives_of_an_fsdp2_model, how)
    parts["s23 wrapped"] = ours.error_of_an_fsdp2_model
    return run_cases(parts, ranks=2)


@pytest.mark.parametrize("name", ON_RANKS)
def test_two_ranks(
    name: str, scenarios: ModuleType, outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = {rank: ("ok", value) for rank, value in enumerate(outcomes[name].values())}
    monkeypatch.setattr(scenarios, "run_ranks", lambda *_, **__: returned)
    getattr(scenarios, name)(ON_RANKS[name][0])


@pytest.mark.parametrize("how", ["whole", "block"])
def test_s23_an_fsdp2_model_is_never_compiled_without_its_collectives(how: str, outcomes: dict[str, Outcome]) -> None:
    """Two blocks of four parameters: gathered in forward, gathered again where backward needs it, reduced."""
    first, second = outcomes[f"s23 {how}"].values()
    assert first == second
    assert first >= 8 + 8


def test_s23_where_the_model_cannot_be_converted_the_error_says_what_to_call(outcomes: dict[str, Outcome]) -> None:
    for error in outcomes["s23 wrapped"].values():
        assert "UncapturedCollectives" in error
        assert "overlap_pass.make_traceable(model)" in error
