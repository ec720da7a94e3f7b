"""Where strategies are found by name: a tuple of built-ins, and an entry-point group for everybody else.

A strategy is a frozen dataclass with a ``name: ClassVar[str]`` and a method ``schedule(problem) -> Schedule``; its
fields are its options. A package adds one with

.. code-block:: toml

    [project.entry-points."overlap_pass.strategies"]
    my_strategy = "my_package.my_module:MyStrategy"

where the entry point's name is the strategy's name.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from overlap_pass.errors import OptionError
from overlap_pass.schedule.strategies import BUILTIN
from overlap_pass.schedule.types import Strategy
from overlap_pass.spec import build, nearest, spec, split

__all__ = ["ENTRY_POINT_GROUP", "Registry", "parse", "registry", "spec"]

ENTRY_POINT_GROUP = "overlap_pass.strategies"


@dataclass(frozen=True)
class Registry:
    """The strategies of one process.

    Attributes:
        builtin: strategy classes of this package.
        plugins: entry points of other packages; loaded only when asked for by name.

    Raises:
        OptionError: two strategies have the same name; the message says where both come from.
    """

    builtin: tuple[type[Any], ...]
    plugins: tuple[EntryPoint, ...] = ()

    def __post_init__(self) -> None:
        origin: dict[str, str] = {}
        classes = [(cls.name, f"{cls.__module__}:{cls.__qualname__}") for cls in self.builtin]
        for name, where in [*classes, *((plugin.name, plugin.value) for plugin in self.plugins)]:
            if name in origin:
                raise OptionError(f"two strategies are named {name!r}: {origin[name]} and {where}; rename one of them")
            origin[name] = where

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every name that ``parse`` accepts: built-ins in their order, then plugins by name."""
        return (*(cls.name for cls in self.builtin), *sorted(plugin.name for plugin in self.plugins))

    def find(self, name: str, *, option: str = "strategy") -> type[Any]:
        """The strategy class of that name.

        Raises:
            OptionError: unknown name, or a plugin that is no strategy.
        """
        for cls in self.builtin:
            if cls.name == name:
                return cls
        for plugin in self.plugins:
            if plugin.name == name:
                return _load(plugin)
        raise OptionError(f"{option}={name!r} is no strategy: {nearest(name, self.names)}")

    def parse(self, text: str, *, option: str = "strategy") -> Strategy:
        """Make a strategy from its spec string, such as ``"latest_start"`` or ``"latest_start{margin=1.25}"``.

        Raises:
            OptionError: no spec, unknown name, unknown field, or a value of the wrong type.
        """
        name, fields = split(text, option=option)
        return cast(Strategy, build(self.find(name, option=option), fields, option=option))


@cache
def registry() -> Registry:
    """The built-in strategies and those of the packages installed beside this one."""
    return Registry(builtin=tuple(BUILTIN), plugins=tuple(entry_points(group=ENTRY_POINT_GROUP)))


def parse(text: str, *, option: str = "strategy") -> Strategy:
    """``registry().parse``: a strategy from its spec string."""
    return registry().parse(text, option=option)


def _load(plugin: EntryPoint) -> type[Any]:
    where = f"strategy {plugin.name!r} of entry point {plugin.value}"
    try:
        cls = plugin.load()
    except (ImportError, AttributeError) as error:
        raise OptionError(f"{where} cannot be loaded: {error}") from error
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and callable(getattr(cls, "schedule", None))):
        raise OptionError(f"{where} is no dataclass with a method schedule(problem)")
    if not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise OptionError(f"{where} must be frozen: write @dataclass(frozen=True)")
    if getattr(cls, "name", None) != plugin.name:
        raise OptionError(f"{where} calls itself {getattr(cls, 'name', None)!r}: both names must be the same")
    return cls
