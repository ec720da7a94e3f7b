"""The systems that ``verify`` compares: each makes the same freshly built model run in its own way, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from overlap_pass.errors import OptionError
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.profiling import peers, unsharded
from overlap_pass.report.verification import SystemKind
from overlap_pass.spec import nearest

__all__ = ["BASELINES", "Variant", "baselines", "scheduled"]

Prepare = Callable[[nn.Module], Callable[..., Any]]


@dataclass(frozen=True)
class Variant:
    """One system.

    Attributes:
        name: what reports call it.
        prepare: takes a sharded model as ``make_step`` returns it, changes it in place, and returns what the step calls
            (the model itself, so that code that holds it already runs the new way).
        kind: what it is measured for.
        bitwise_with: name of the variant whose losses and gradients must be equal bit for bit (same lowering, same
            order of additions), ``None`` where only a tolerance can be asked for.
    """

    name: str
    prepare: Prepare
    kind: SystemKind = SystemKind.BASELINE
    bitwise_with: str | None = None


def scheduled(options: Mapping[str, Any], name: str = "overlap") -> Variant:
    """The model compiled with the ``overlap`` backend and these options."""
    return Variant(name, partial(_overlap, dict(options)), SystemKind.SCHEDULED, bitwise_with="as-written")


def _overlap(options: dict[str, Any], model: nn.Module) -> nn.Module:
    make_traceable(model).compile(backend="overlap", options=options, dynamic=False)
    return model


def _fsdp2(model: nn.Module) -> nn.Module:
    return model


def _fsdp2_compile(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, FSDPModule) and module is not model:
            module.compile(dynamic=False)  # type: ignore[operator]
    return model


_AS_WRITTEN = {"strategy": "as_written", "coalesce": "off", "transport": "nccl", "reduction": "ring"}

BASELINES: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("as-written", partial(_overlap, _AS_WRITTEN)),
        Variant("fsdp2", _fsdp2),
        Variant("fsdp2-compile", _fsdp2_compile),
        Variant("torch-overlap", peers.torch_overlap),
        Variant("torch-manual", peers.torch_manual),
        Variant("compute-only", unsharded.compute_only, SystemKind.FLOOR),
    )
}


def baselines(names: str) -> tuple[Variant, ...]:
    """Variants from a comma-separated list.

    Raises:
        OptionError: an unknown name, with the nearest known one; or none that is to be beaten.
    """
    found = []
    for name in dict.fromkeys(part.strip() for part in names.split(",") if part.strip()):
        if name not in BASELINES:
            raise OptionError(f"against={name!r} is unknown: {nearest(name, BASELINES)}")
        found.append(BASELINES[name])
    if not any(variant.kind is SystemKind.BASELINE for variant in found):
        beatable = [name for name, variant in BASELINES.items() if variant.kind is SystemKind.BASELINE]
        raise OptionError(f"against={names!r} names nothing to compare with: {nearest('', beatable)}")
    return tuple(found)
