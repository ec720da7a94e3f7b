"""The user's training step, as ``verify`` takes it: a function that builds model, step and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overlap_pass.errors import OptionError
from overlap_pass.profiling.scripts import function_of_file

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
    function = function_of_file(path, name, named=repr(target))
    return lambda: function(**(arguments or {}))
