"""The model to plan, as the command line names it: a preset, ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from overlap_pass.errors import CaptureError, OptionError, OverlapPassError
from overlap_pass.profiling.llama import preset
from overlap_pass.profiling.scripts import function_of_file, function_of_module
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
        CaptureError: from what is returned, where the function itself raises.
    """
    if ":" not in target:
        preset(target)
        return llama_step(target, 8192 if tokens is None else tokens)
    place, _, name = target.rpartition(":")
    named = f"model={target!r}"
    find = function_of_file if place.endswith(".py") else function_of_module
    function = find(place, name, named=named)
    if tokens is None:
        return _blamed(function, named)
    if "tokens" not in inspect.signature(function).parameters:
        raise OptionError(f"{named}: {name} has no parameter 'tokens', so its tokens cannot be set")
    return _blamed(partial(function, tokens=tokens), named)


def _blamed(function: Callable[..., Any], named: str) -> Build:
    """The same function, whose errors say that they are its own."""

    def build(mesh: DeviceMesh) -> Any:
        try:
            return function(mesh)
        except OverlapPassError:
            raise
        except Exception as error:
            raise CaptureError(
                f"{named}: called with the mesh it raised {type(error).__name__}: {error} (--debug shows where)"
            ) from error

    return build
