"""Functions that a user names on the command line, as ``path/to/file.py:function`` or ``package.module:function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from overlap_pass.errors import OptionError

__all__ = ["function_of_file", "function_of_module"]


def function_of_file(place: str, name: str, *, named: str) -> Callable[..., Any]:
    """Runs the file ``place`` and returns its function ``name``.

    Args:
        named: how the user named the two, which begins every message.

    Raises:
        OptionError: no such file or function, or the file raised when it was run.
    """
    file = Path(place)
    spec = importlib.util.spec_from_file_location(f"overlap_pass_script_{file.stem}", file)
    if not file.is_file():
        raise OptionError(f"{named}: there is no file {place!r}")
    if spec is None or spec.loader is None:
        raise OptionError(f"{named}: {place!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionError(f"{named}: {place!r} cannot be loaded: {type(error).__name__}: {error}") from error
    return _function(module, place, name, named)


def function_of_module(place: str, name: str, *, named: str) -> Callable[..., Any]:
    """Imports the module ``place`` and returns its function ``name``; arguments as for :func:`function_of_file`.

    Raises:
        OptionError: no such module or function.
    """
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise OptionError(f"{named}: {error}") from error
    return _function(module, place, name, named)


def _function(module: ModuleType, place: str, name: str, named: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{named}: {place!r} defines no function {name!r}")
    return function  # type: ignore[no-any-return]
