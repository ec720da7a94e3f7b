"""Options are read once and everything that would be ignored in silence is refused by name."""

from __future__ import annotations

from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest

from overlap_pass.config import Config, FsdpMode
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import HardwareError, OptionError
from overlap_pass.memory.budget import Absolute, Fsdp2
from overlap_pass.registry import parse, spec
from overlap_pass.schedule.launches import Launches


def test_no_options_are_the_documented_defaults():
    for config in (Config(), Config.from_options(), Config.from_options({})):
        assert spec(config.strategy) == "fill_gaps"
        assert config.memory_budget == Fsdp2()
        assert config.hardware is None
        assert config.report is None
        assert config.fsdp is FsdpMode.AUTO
        assert config.coalesce == "auto"


def test_every_option_is_read():
    config = Config.from_options(
        {
            "strategy": "latest_start{margin=1.25}",
            "memory_budget": "60GiB",
            "hardware": "h200",
            "report": "out/overlap.html",
            "fsdp": "error",
            "coalesce": "64MiB",
        }
    )
    assert spec(config.strategy) == "latest_start{margin=1.25}"
    assert config.memory_budget == Absolute(60 * 2**30)
    assert config.hardware == load_hardware("h200")
    assert config.report == Path("out/overlap.html")
    assert config.fsdp is FsdpMode.ERROR
    assert config.coalesce == 64 * 2**20


def test_what_is_said_of_launches_is_handed_on_together():
    said = Config.from_options({"coalesce": "64MiB", "communicators_in_flight": 2, "final_places": "off"}).launches
    assert said == Launches(64 * 2**20, "agreed", 2, final_places=False)


def test_an_option_set_to_none_keeps_its_default():
    assert Config.from_options({field.name: None for field in fields(Config)}) == Config()


def test_objects_are_taken_as_they_are():
    strategy, budget, hardware = parse("as_written"), Absolute(1), load_hardware("a100")
    config = Config.from_options({"strategy": strategy, "memory_budget": budget, "hardware": hardware})
    assert (config.strategy, config.memory_budget, config.hardware) == (strategy, budget, hardware)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budgt": "1GiB"}, "unknown option 'memory_budgt': did you mean 'memory_budget'?"),
        ({3: 4}, "unknown option 3"),
        ({"strategy": "latest_strat"}, "strategy='latest_strat' is no strategy: did you mean 'latest_start'?"),
        ({"strategy": 7}, "strategy=7 is neither a spec"),
        ({"memory_budget": "lots"}, "memory_budget='lots' is no budget"),
        ({"memory_budget": -1}, "memory_budget=-1 leaves no memory"),
        ({"hardware": "h101"}, "hardware='h101' is not known"),
        ({"hardware": 100}, "hardware=100 is no text"),
        ({"report": "page.pdf"}, "report='page.pdf' must end with .html or .json"),
        ({"report": True}, "report=True is no text"),
        ({"fsdp": "of"}, "fsdp='of' is not accepted: did you mean 'off'?"),
        ({"coalesce": True}, "coalesce=True is neither 'auto', 'off' nor a size"),
        ({"coalesce": 0}, "coalesce=0 is too small"),
        ({"coalesce": "of"}, "coalesce='of' is no size"),
        ({"launch_order": "agred"}, "launch_order='agred' is not accepted: did you mean 'agreed'?"),
        ({"communicators_in_flight": 0}, "communicators_in_flight=0 is not accepted: a whole number from 1 on"),
        ({"communicators_in_flight": "2"}, "communicators_in_flight='2' is not accepted"),
        (
            {"communicators_in_flight": 1, "launch_order": "priced"},
            "communicators_in_flight=1 holds back launches in the order of all ranks, and launch_order='priced' has no such",
        ),
        ({"plan": 7}, "plan=7 is no text"),
        (
            {"plan": "plans", "strategy": "greedy"},
            "strategy='greedy' has no effect on a saved plan: leave it out, or plan=",
        ),
        ({"plan": "plans", "save_plan": "plans"}, "save_plan='plans' has no effect on a saved plan"),
        ({"memory_budget": "2GB x"}, "memory_budget='2GB x' is no budget"),
        ({"pure_namespaces": "mylib"}, "pure_namespaces='mylib' is no list of namespaces: write ['mylib']"),
        ({"pure_namespaces": ["mylib::norm"]}, "'mylib::norm' is no namespace; of 'mylib::fused_norm' write 'mylib'"),
    ],
)
def test_what_is_not_accepted_is_named(options, message):
    with pytest.raises(OptionError) as caught:
        Config.from_options(options)
    assert message in str(caught.value)


def test_what_is_in_effect_is_every_option_that_shapes_a_plan_but_those_that_a_saved_plan_answers():
    names = dict(Config.from_options({"pure_namespaces": ["a", "b"], "communicators_in_flight": 2}).in_effect)
    shapes = {field.name for field in fields(Config)} - {"report", "save_plan", "plan", "verify", "hardware", "mode"}
    assert set(names) - {"mode"} == shapes
    assert names["pure_namespaces"] == "a, b"
    saved = dict(Config.from_options({"plan": "plans"}).in_effect)
    assert saved["plan"] == "plans"
    assert not {"strategy", "coalesce", "launch_order"} & set(saved)


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        (None, "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_auto_picks_the_hardware_by_the_name_of_the_device(device_name, expected):
    assert Config().hardware_for(device_name) == load_hardware(expected)


def test_auto_hardware_knows_ranks_that_talk_through_host_memory(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert Config().hardware_for("NVIDIA H200").name == "h200-host-staged"
    # There is no such file for it.
    assert Config().hardware_for("NVIDIA A100-SXM4-80GB").name == "a100"


def test_auto_refuses_a_device_that_it_does_not_know():
    with pytest.raises(HardwareError, match=r"hardware='auto' knows no 'Tesla T4': name the nearest of .*h100"):
        Config().hardware_for("Tesla T4")


def test_hardware_that_was_asked_for_wins_over_the_device():
    assert Config.from_options({"hardware": "a100"}).hardware_for("NVIDIA H200") == load_hardware("a100")


def test_the_digest_is_that_of_the_meaning_and_not_of_the_spelling():
    assert Config.from_options({"memory_budget": "1GiB"}).digest == Config.from_options({"memory_budget": 2**30}).digest
    assert Config.from_options({"report": "page.html"}).digest == Config().digest


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "as_written"},
        {"memory_budget": "unlimited"},
        {"hardware": "h100"},
        {"fsdp": "off"},
        {"coalesce": "off"},
        {"launch_order": "priced"},
        {"launch_order": "free"},
        {"communicators_in_flight": 2},
        {"pure_namespaces": ["mylib"]},
        {"transport": "nccl"},
        {"reduction": "ring"},
        {"final_places": "off"},
        {"reshard": "auto"},
        {"mode": "reduce-overhead"},
    ],
)
def test_whatever_can_change_a_plan_changes_the_digest(options):
    assert Config.from_options(options).digest != Config().digest


def test_the_digest_follows_the_content_of_a_hardware_file(tmp_path):
    path = tmp_path / "mine.toml"
    content = (files("overlap_pass.cost") / "data" / "h100.toml").read_text()
    path.write_text(content)
    before = Config.from_options({"hardware": path})
    path.write_text(content.replace("gpus = 8", "gpus = 4"))
    after = Config.from_options({"hardware": str(path)})
    assert after.hardware.node.gpus == 4
    assert before.digest != after.digest
