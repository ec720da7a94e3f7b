"""Examples in docstrings of the torch-free rooms run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from tests.checks.test_torch_free import torch_free_modules


def modules() -> Iterator[ModuleType]:
    for name in torch_free_modules():
        module = importlib.import_module(name)
        yield module
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
            yield importlib.import_module(found.name)


def test_every_example_prints_what_it_says():
    results = {module.__name__: doctest.testmod(module, optionflags=doctest.ELLIPSIS) for module in modules()}
    assert [name for name, result in results.items() if result.failed] == []
    assert sum(result.attempted for result in results.values()) > 0
