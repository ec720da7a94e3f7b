"""Overlaps FSDP collectives with compute: a ``torch.compile`` backend and its planner.

Importing this package imports no torch; names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from overlap_pass.fsdp.convert import is_traceable, make_traceable, restore
    from overlap_pass.fsdp.edge import StepEdge
    from overlap_pass.fsdp.sharding import shard
    from overlap_pass.profiling.trace_plan import plan_model as plan
    from overlap_pass.profiling.verify import verify

__all__ = ["StepEdge", "__version__", "is_traceable", "make_traceable", "plan", "restore", "shard", "verify"]

__version__ = "0.1.0"

# Public name -> (module, name in it).
_EXPORTS = {
    "StepEdge": ("overlap_pass.fsdp.edge", "StepEdge"),
    "is_traceable": ("overlap_pass.fsdp.convert", "is_traceable"),
    "make_traceable": ("overlap_pass.fsdp.convert", "make_traceable"),
    "plan": ("overlap_pass.profiling.trace_plan", "plan_model"),
    "restore": ("overlap_pass.fsdp.convert", "restore"),
    "shard": ("overlap_pass.fsdp.sharding", "shard"),
    "verify": ("overlap_pass.profiling.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
