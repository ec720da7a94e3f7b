"""Converting a ``fully_shard`` model where ``torch.compile`` is called on it, without a further call by the user.

torch loads a backend's entry point inside ``torch.compile``, just before it wraps the model through
``torch._dynamo.optimize``. A wrapper around that function, installed while the entry point is loaded, therefore sees the
first model already. It looks at nothing but calls whose backend is ours, and hands every argument on as it came.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from overlap_pass.errors import OptionError, UncapturedCollectives
from overlap_pass.fsdp.compat import original_class
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.fsdp.discover import has_live_units
from overlap_pass.fsdp.module import UNIT, describe

__all__ = ["ENVIRONMENT", "MODES", "convert_for", "install"]

log = logging.getLogger("overlap_pass")

# Set to 0 to leave every model alone, whatever the options say.
ENVIRONMENT = "OVERLAP_PASS_AUTOCONVERT"

MODES = ("auto", "off", "error")
"""``auto`` converts; ``off`` leaves the model alone; ``error`` refuses a model that is not converted yet."""

_MARK = "_overlap_pass_is_ours"


def _accept(backend: object, **settings: Any) -> None:
    """Everything is accepted here and left for the backend to judge."""


def install(is_ours: Callable[[object], bool], check: Callable[..., None] = _accept) -> None:
    """Make ``torch.compile(model, backend=...)`` and ``model.compile(backend=...)`` convert the model first.

    Installing again only exchanges ``is_ours`` and ``check``; torch is wrapped once.

    Args:
        is_ours: whether a backend function, as torch has looked it up, is one of ours.
        check: ``check(backend, options=..., mode=...)``, as far as these were given, raises for what the backend would
            refuse later; it is called before anything is converted.
    """
    if hasattr(torch._dynamo.optimize, _MARK):
        setattr(torch._dynamo.optimize, _MARK, (is_ours, check))
        return
    original = torch._dynamo.optimize

    @functools.wraps(original)
    def optimize(*args: Any, **kwargs: Any) -> Any:
        compile_ = original(*args, **kwargs)
        backend = kwargs.get("backend", args[0] if args else None)
        # torch.compile wraps the backend's function together with its options.
        function = getattr(backend, "compiler_fn", backend)
        is_ours, check = getattr(optimize, _MARK)
        if kwargs.get("disable") or not is_ours(function):
            return compile_
        settings = getattr(backend, "kwargs", {})
        check(function, **settings)
        options = settings.get("options") or {}

        def convert_and_compile(target: Any, *rest: Any, **named: Any) -> Any:
            convert_for(target, options)
            return compile_(target, *rest, **named)

        return convert_and_compile

    setattr(optimize, _MARK, (is_ours, check))
    torch._dynamo.optimize = optimize


def convert_for(target: object, options: dict[str, Any]) -> None:
    """Convert what is about to be compiled, if that is an FSDP2 model and the options let it.

    Args:
        target: what ``torch.compile`` was called on: a module, a method of one, or any function (left alone: it may
            close over a model that cannot be seen from here).
        options: the backend's options; ``"fsdp"`` is one of :data:`MODES`.

    Raises:
        OptionError: ``options["fsdp"]`` is no mode.
        UncapturedCollectives: the mode is ``error`` and the model is not converted.
        ConversionError: the model cannot be converted.
    """
    mode = options.get("fsdp", "auto")
    if mode not in MODES:
        raise OptionError(f"fsdp={mode!r} is no mode: use one of {', '.join(map(repr, MODES))}")
    model = target if isinstance(target, nn.Module) else getattr(target, "__self__", None)
    if not isinstance(model, nn.Module) or mode == "off" or os.environ.get(ENVIRONMENT) == "0":
        return
    if not has_live_units(model):
        return
    if mode == "error":
        raise UncapturedCollectives(
            f"{type(model).__name__} is under fully_shard() and not traceable, and options has fsdp='error': call "
            "overlap_pass.make_traceable(model) before torch.compile"
        )
    name = original_class(model).__name__
    make_traceable(model)
    log.info("%s", _summary(name, model))


def _summary(name: str, model: nn.Module) -> str:
    units = {id(module.__dict__[UNIT]) for module in model.modules() if UNIT in module.__dict__}
    return (
        f"made {name} traceable, {len(units)} units: {describe(model)}; "
        f"options={{'fsdp': 'off'}} or {ENVIRONMENT}=0 leaves models alone"
    )
