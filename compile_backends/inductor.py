"""Lowering by Inductor: its own pipeline, with three passes of ours and nothing of torch's that would reorder again.

Everything is handed to ``compile_fx`` as ``config_patches``, which torch applies to this compilation alone (and again
to a backward that is compiled later): no global setting is touched, and passes that the user has configured run first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch._functorch.config as functorch_config
import torch.fx as fx
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn

import compile_backends.lowerings  # noqa: F401  registers them
from compile_backends import roll_call
from compile_backends.compilation import Compilation
from compile_backends.identity import source_digest
from compile_backends.settle import Settle
from overlap_pass.config import Config
from overlap_pass.errors import OptionError
from overlap_pass.fsdp.gather import gather
from overlap_pass.profiling.modes import mode_patches
from overlap_pass.rewrite.padding import note_padding
from overlap_pass.rewrite.partition import prepare_joint, split

__all__ = ["lower"]

_KEEP_ORDER: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}
"""Inductor settings that would move or merge collectives after us; those that a torch version lacks are left out."""


class _GraphPass(CustomGraphPass):
    """One of our stages as Inductor's cacheable pass; ``uuid`` puts the plan's identity into the cache key."""

    def __init__(self, run: Callable[[fx.Graph], None], uuid: str) -> None:
        self._run, self._uuid = run, uuid

    def __call__(self, graph: fx.Graph) -> None:
        self._run(graph)

    def uuid(self) -> str:
        return self._uuid


class _Partitioner(CustomPartitionerFn):
    """The partitioner that Inductor would use, with ``split``'s order of what is saved."""

    def __init__(self, split: Callable[..., Any], uuid: str) -> None:
        self._split, self._uuid = split, uuid

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        return self._split(gm, joint_inputs, **options)

    def uuid(self) -> str:
        return self._uuid


class _Sequence(CustomGraphPass):
    """Several passes as one, for torch versions whose settings take a single pass."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self._passes = passes

    def __call__(self, graph: fx.Graph) -> None:
        for graph_pass in self._passes:
            graph_pass(graph)

    def uuid(self) -> Any:
        ids = [graph_pass.uuid() if isinstance(graph_pass, CustomGraphPass) else None for graph_pass in self._passes]
        return None if None in ids else tuple(ids)


def lower(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> Callable[..., Any]:
    """Compile a Dynamo graph with Inductor in the planned order."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    patches = {
        **mode_patches(compilation.config.mode),
        **{name: value for name, value in _KEEP_ORDER.items() if _exists(name)},
        **_caching(compilation.config),
        "custom_partitioner_fn": _partitioner(compilation),
        "_post_fusion_custom_pass": Settle(
            inductor_config._post_fusion_custom_pass, f"overlap-settle-{compilation.identity}"
        ),
        **{
            name: _after_users(name, _GraphPass(stage, f"overlap-{name}-{compilation.identity}"))
            for name, stage in (
                ("joint_custom_pre_pass", note_padding),
                ("joint_custom_post_pass", prepare_joint),
                ("post_grad_custom_post_pass", compilation.prepare),
            )
        },
    }
    if not roll_call.wanted():
        return compile_fx(gm, example_inputs, config_patches=patches)  # type: ignore[no-any-return]

    def compile_guarded(*args: Any, **options: Any) -> Any:
        compilation.call = None
        return compilation.guarded(compile_fx_inner(*args, **options))

    with functorch_config.patch(enable_autograd_cache=False):  # it keeps Inductor's own objects only
        return compile_fx(gm, example_inputs, inner_compile=compile_guarded, config_patches=patches)  # type: ignore[no-any-return]


def _partitioner(compilation: Compilation) -> Any:
    """Ours; a partitioner of the user's stays, and decides what is saved."""
    users, by_budget = inductor_config.custom_partitioner_fn, compilation.by_budget
    if users is None:
        return _Partitioner(split if by_budget is None else by_budget.split, f"overlap-split-{compilation.identity}")
    if by_budget is not None:
        raise OptionError(
            "reshard='auto' decides in the partitioner, and torch._inductor.config.custom_partitioner_fn is set: leave "
            "one of the two out"
        )
    return users


def _after_users(setting: str, ours: CustomGraphPass) -> Any:
    existing = getattr(inductor_config, setting)
    if existing is None:
        return ours
    users = list(existing) if isinstance(existing, (list, tuple)) else [existing]
    return [*users, ours] if _takes_lists() else _Sequence([*users, ours])


def _takes_lists() -> bool:
    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def _exists(name: str) -> bool:
    holder: Any = inductor_config
    for part in name.split("."):
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def _caching(config: Config) -> dict[str, Any]:
    """Tells AOTAutograd's cache that the capture's gather is pure (its code is part of the key).

    A graph out of a cache was planned when it was put there: whoever wants a report, a saved plan, or a comparison of what
    ranks launch, gets it from a new plan.
    """
    if config.needs_planning or roll_call.wanted():
        return {"fx_graph_cache": False, "fx_graph_remote_cache": False}
    setting = "unsafe_marked_cacheable_functions"
    if not _exists(setting):
        return {}
    return {setting: {**getattr(inductor_config, setting), f"{gather.__module__}.{gather.__name__}": source_digest()}}
