"""The systems that ``verify`` compares: each makes a runnable of the same freshly built model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from overlap_pass.errors import OptionError
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.rewrite.partition import prepare_joint
from overlap_pass.spec import nearest

__all__ = ["BASELINES", "Variant", "baselines", "scheduled"]

Prepare = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Variant:
    """One system.

    Attributes:
        name: what reports call it.
        prepare: model → what the step calls.
        bitwise_with: name of the variant whose losses and gradients must be equal bit for bit (same lowering, same
            order of additions), ``None`` where only a tolerance can be asked for.
    """

    name: str
    prepare: Prepare
    bitwise_with: str | None = None


def scheduled(options: Mapping[str, Any]) -> Variant:
    """The model compiled with the ``overlap`` backend and these options."""
    return Variant("overlap", partial(_overlap, dict(options)), bitwise_with="as-written")


def _overlap(options: dict[str, Any], model: nn.Module) -> Callable[..., Any]:
    return torch.compile(make_traceable(model), backend="overlap", options=options, dynamic=False)


def _fsdp2(model: nn.Module) -> Callable[..., Any]:
    return model


def _fsdp2_compile(model: nn.Module) -> Callable[..., Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.compile(dynamic=False)  # type: ignore[operator]
    return model


def _torch_overlap(model: nn.Module) -> Callable[..., Any]:
    options = {
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "aten_distributed_optimizations.collective_bucketing": True,
        "joint_custom_post_pass": prepare_joint,  # without it torch would save gathered parameters (ZeRO-2)
    }
    return torch.compile(make_traceable(model), options=options, dynamic=False)


BASELINES: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("as-written", partial(_overlap, {"strategy": "as_written"})),
        Variant("fsdp2", _fsdp2),
        Variant("fsdp2-compile", _fsdp2_compile),
        Variant("torch-overlap", _torch_overlap),
    )
}


def baselines(names: str) -> tuple[Variant, ...]:
    """Variants from a comma-separated list.

    Raises:
        OptionError: an unknown name, with the nearest known one.
    """
    found = []
    for name in dict.fromkeys(part.strip() for part in names.split(",") if part.strip()):
        if name not in BASELINES:
            raise OptionError(f"against={name!r} is unknown: {nearest(name, BASELINES)}")
        found.append(BASELINES[name])
    if not found:
        raise OptionError(f"against={names!r} names nothing: {nearest('', BASELINES)}")
    return tuple(found)
