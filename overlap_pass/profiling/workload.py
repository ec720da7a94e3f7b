"""The user's training step, as ``verify`` takes it: a function that builds model, step and data."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overlap_pass.errors import OptionError

__all__ = ["MakeStep", "Step", "Workload", "load_make_step"]

Step = Callable[..., torch.Tensor]
"""``step(run, *data) -> loss``: forward and backward of ``run(...)``, the model or its compiled form."""

MakeStep = Callable[[], tuple[nn.Module, Step, Sequence[Any]]]
"""``make_step() -> (model, step, data)``: a freshly built ``fully_shard`` model, equal at every call."""


@dataclass(frozen=True)
class Workload:
    """One instance of the user's step.

    Attributes:
        model: the sharded model, on this rank's device.
        run: what is called in the step: the model itself or its compiled form.
        step: see :data:`Step`.
        data: arguments of the step behind ``run``.
    """

    model: nn.Module
    run: Callable[..., Any]
    step: Step
    data: Sequence[Any]

    def __call__(self) -> torch.Tensor:
        """One step; gradients are those of this step alone."""
        self.drop_gradients()
        return self.step(self.run, *self.data)

    def drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def load_make_step(target: str, arguments: dict[str, Any] | None = None) -> MakeStep:
    """The function named ``path/to/file.py:function``, with ``arguments`` bound.

    Raises:
        OptionError: no such file or function, or the file cannot be run; the message names it.
    """
    path, colon, name = target.rpartition(":")
    if not colon or not name.isidentifier():
        raise OptionError(f"{target!r} is no step: write path/to/train.py:function")
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"{target!r}: there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(f"overlap_pass_workload_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise OptionError(f"{target!r}: {path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise OptionError(f"{target!r}: {path!r} cannot be loaded: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{target!r}: {path!r} defines no function {name!r}")
    return lambda: function(**(arguments or {}))
