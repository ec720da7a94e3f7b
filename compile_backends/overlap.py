"""The backends that ``torch.compile(model, backend=…)`` finds by name: ``overlap`` and ``overlap_eager``.

Loading this module (torch does so inside ``torch.compile`` when the name is first used) also installs the automatic
conversion of ``fully_shard`` models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.fx as fx

from compile_backends import eager, inductor
from compile_backends.compilation import Compilation
from compile_backends.first_steps import lowered
from overlap_pass.config import Config, FsdpMode
from overlap_pass.errors import OptionError, UncapturedCollectives
from overlap_pass.fsdp import autoconvert, discover
from overlap_pass.profiling.environment import device_name, is_first_rank
from overlap_pass.profiling.modes import mode_patches

__all__ = ["overlap", "overlap_eager"]


def overlap(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Schedule the collectives of a graph and lower it with Inductor.

    Args:
        options: see ``overlap_pass.config.Config``.
        mode: one of ``torch.compile``'s modes, handed to Inductor; beside options, ``options={"mode": …}``.

    Raises:
        OptionError: an option or the mode is unknown or out of range.
        UncapturedCollectives: the graph comes from a ``fully_shard`` module that was not converted.
        InfeasibleBudget: the memory budget is below what the graph needs in any order.
    """
    config = _checked(overlap, options=options, mode=mode)
    _refuse_live_fsdp(gm, config)

    def lower(graph: fx.GraphModule, inputs: Sequence[Any], chosen: Config) -> Callable[..., Any]:
        return inductor.lower(graph, inputs, Compilation.begin(graph, chosen))

    return lowered(gm, example_inputs, config, lower)


def overlap_eager(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Schedule the collectives of a graph and run the FX graph as it is; numbers are those of eager FSDP2.

    Args and errors as for :func:`overlap`; a ``mode`` is refused, since nothing is there that it could change.
    """
    config = _checked(overlap_eager, options=options, mode=mode)
    _refuse_live_fsdp(gm, config)

    def lower(graph: fx.GraphModule, inputs: Sequence[Any], chosen: Config) -> Callable[..., Any]:
        return eager.lower(graph, inputs, Compilation.begin(graph, chosen))

    return lowered(gm, example_inputs, config, lower)


def _checked(backend: object, *, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Config:
    """What the user asked for, or the error that says what is wrong with it; asked when ``torch.compile`` is called."""
    config = Config.from_options({**({} if mode is None else {"mode": mode}), **(options or {})})
    if backend is overlap_eager and config.mode != "default":
        raise OptionError(
            f"mode={config.mode!r} has no effect on backend 'overlap_eager': leave it out or use 'overlap'"
        )
    mode_patches(config.mode)
    config.hardware_for(device_name())
    if config.report is not None and is_first_rank():
        _refuse_unwritable("report", config.report)
    if config.save_plan is not None and not config.save_plan.is_dir():
        _refuse_unwritable("save_plan", config.save_plan)
    if config.plan is not None and not config.plan.is_dir():
        raise OptionError(f"plan={str(config.plan)!r} is no folder: save_plan makes one")
    return config


def _refuse_unwritable(option: str, path: Path) -> None:
    """It is written when the graphs have been planned: too late to hear of a misspelt folder."""
    reason = ""
    if not path.parent.is_dir():
        reason = f"there is no folder {str(path.parent)!r}"
    elif path.is_dir():
        reason = "it is a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission"
    if reason:
        raise OptionError(f"{option}={str(path)!r} cannot be written: {reason}; name one in a folder that exists")


def _refuse_live_fsdp(gm: fx.GraphModule, config: Config) -> None:
    """A graph cut out of a live FSDP2 module holds no collective: compiling it would be success on nothing."""
    if config.fsdp is FsdpMode.OFF:
        return
    module = discover.live_fsdp_source(gm)
    if module is not None:
        raise UncapturedCollectives(
            f"{module} is sharded by fully_shard with its hooks in place, so this graph holds none of its collectives. "
            "Call overlap_pass.make_traceable(model) before torch.compile (it happens by itself when the model, not a "
            "function that closes over it, is compiled), or pass options={'fsdp': 'off'} to compile the pieces as they are"
        )


def _is_ours(backend: object) -> bool:
    return backend in (overlap, overlap_eager)


autoconvert.install(_is_ours, check=_checked)
