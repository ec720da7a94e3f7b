"""Functions of Python files that a user names on the command line, as ``path/to/file.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlap_pass.errors import OptionError

__all__ = ["function_of"]


def function_of(place: str, name: str, *, named: str) -> Callable[..., Any]:
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
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{named}: {place!r} defines no function {name!r}")
    return function  # type: ignore[no-any-return]
