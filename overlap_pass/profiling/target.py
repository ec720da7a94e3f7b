"""The model to plan, as the command line names it: a preset, ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from overlap_pass.errors import OptionError
from overlap_pass.profiling.llama import preset
from overlap_pass.profiling.trace_plan import Build, llama_step

__all__ = ["build_of"]


def build_of(target: str, *, tokens: int | None) -> Build:
    """What :func:`~overlap_pass.profiling.trace_plan.trace_model` takes.

    Args:
        target: a preset of ``profiling.llama``, or a function ``build(mesh) -> (model, inputs)``. One with a parameter
            ``tokens`` is called with it; one without has its inputs fixed.
        tokens: tokens per rank and step; ``None`` for what a function does by itself (presets: 8192).

    Raises:
        OptionError: no such preset, module, file or function; or ``tokens`` for a function that does not take it.
    """
    if ":" not in target:
        preset(target)
        return llama_step(target, 8192 if tokens is None else tokens)
    place, _, name = target.rpartition(":")
    module = _from_file(target, Path(place)) if place.endswith(".py") else _from_path(target, place)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"model={target!r}: {place!r} defines no function {name!r}")
    if tokens is None:
        return function  # type: ignore[no-any-return]
    if "tokens" not in inspect.signature(function).parameters:
        raise OptionError(f"model={target!r}: {name} has no parameter 'tokens', so its tokens cannot be set")

    def build(mesh: Any) -> Any:
        return function(mesh, tokens=tokens)

    return build


def _from_path(target: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise OptionError(f"model={target!r}: {error}") from error


def _from_file(target: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"overlap_pass_model_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise OptionError(f"model={target!r}: there is no file {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
