"""Strategies are found by name among built-ins and plugins, and two of one name are never accepted."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import ClassVar

import pytest

from overlap_pass.errors import OptionError
from overlap_pass.registry import ENTRY_POINT_GROUP, Registry, registry
from overlap_pass.schedule.types import Problem, Schedule
from overlap_pass.spec import spec


@dataclass(frozen=True)
class Still:
    name: ClassVar[str] = "still"

    steps: int = 1

    def schedule(self, problem: Problem) -> Schedule:
        return Schedule(spec(self), problem.program.order)


@dataclass(frozen=True)
class Eager:
    name: ClassVar[str] = "eager"

    def schedule(self, problem: Problem) -> Schedule:
        return Schedule(spec(self), problem.program.order)


@dataclass
class Thawed:
    name: ClassVar[str] = "thawed"

    def schedule(self, problem: Problem) -> Schedule:
        return Schedule(spec(self), problem.program.order)


def plugin(name: str, target: str) -> EntryPoint:
    return EntryPoint(name, f"strategies_of_a_third_party:{target}", ENTRY_POINT_GROUP)


@pytest.fixture
def third_party(monkeypatch):
    module = types.ModuleType("strategies_of_a_third_party")
    module.Eager, module.Thawed, module.number = Eager, Thawed, 7
    monkeypatch.setitem(sys.modules, module.__name__, module)


def test_a_builtin_is_made_from_its_spec():
    assert Registry((Still,)).parse("still{steps=3}") == Still(steps=3)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        OptionError, match=r"strategy='stil' is no strategy: did you mean 'still'\? .known: eager, still"
    ):
        Registry((Still, Eager)).parse("stil")


def test_a_plugin_is_loaded_only_when_it_is_asked_for(third_party):
    known = Registry((Still,), (plugin("eager", "Eager"), EntryPoint("broken", "no_such_module:X", ENTRY_POINT_GROUP)))
    assert known.names == ("still", "broken", "eager")
    assert known.parse("eager") == Eager()
    with pytest.raises(OptionError, match="'broken' of entry point no_such_module:X cannot be loaded"):
        known.parse("broken")


def test_two_strategies_of_one_name_are_refused_with_both_origins():
    with pytest.raises(OptionError, match=r"'still': .*test_registry:Still and elsewhere:Still"):
        Registry((Still,), (EntryPoint("still", "elsewhere:Still", ENTRY_POINT_GROUP),))
    with pytest.raises(OptionError, match="two strategies are named 'still'"):
        Registry((Still, Still))


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("number", "number", "is no dataclass with a method schedule"),
        ("missing", "Missing", "cannot be loaded"),
        ("thawed", "Thawed", "must be frozen"),
        ("other", "Eager", "calls itself 'eager'"),
    ],
)
def test_a_plugin_that_is_no_strategy_is_refused(third_party, name, target, message):
    with pytest.raises(OptionError, match=message):
        Registry((), (plugin(name, target),)).parse(name)


def test_every_installed_strategy_has_defaults_and_a_spec_that_is_its_name():
    names = registry().names
    assert "latest_start" in names
    for name in names:
        assert spec(registry().parse(name)) == name
