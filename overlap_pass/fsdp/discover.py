"""Finding what FSDP2 did to a model, and recognising its live hooks from a graph."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.fx import GraphModule

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import compat

__all__ = ["find_units", "has_live_units", "live_fsdp_source"]


def has_live_units(model: nn.Module) -> bool:
    """Whether a module of the model is under FSDP2's own hooks."""
    return any(compat.live_state(module) is not None for module in model.modules())


def find_units(model: nn.Module) -> tuple[compat.UnitView, ...]:
    """Every ``fully_shard`` call whose hooks are live in the model, outer before inner; empty without one.

    Raises:
        ConversionError: this torch lacks something that reading its FSDP2 needs.
    """
    found = (compat.live_state(module) for module in model.modules())
    # One call may cover several modules, which then share a state.
    states = tuple({id(state): state for state in found if state is not None}.values())
    if absent := compat.absent_internals(states):
        raise ConversionError(
            f"torch {torch.__version__} has changed inside: no {', '.join(absent)}. Use a torch that overlap-pass was "
            "tested with (2.11, 2.13) or a newer overlap-pass"
        )
    return tuple(compat.view(state) for state in states)


def live_fsdp_source(gm: GraphModule) -> str | None:
    """Where a Dynamo graph's input comes from, if that is a module with live FSDP2 hooks; ``None`` if none does.

    Such a graph computes with parameters that hooks outside the graph have gathered: it holds no collective, and nothing
    can be overlapped. The string is the module as Python would reach it, such as ``self.blocks[0].attention``.
    """
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            source = compat.fsdp_source(getattr(node.meta.get("grapharg"), "source", None))
            if source is not None:
                return _as_python(source)
    return None


def _as_python(source: str) -> str:
    """Dynamo's ``L['self']._modules['blocks']._modules['0']._parameters`` as ``self.blocks[0]``."""
    source = source.removesuffix("._parameters")
    source = re.sub(r"^[LG]\['(\w+)'\]", r"\1", source)
    source = re.sub(r"\._modules\['(\d+)'\]", r"[\1]", source)
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", source)
