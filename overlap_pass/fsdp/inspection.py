"""Looking at a model before anything is changed: what each parameter's gather will be, and what speaks against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import compat
from overlap_pass.fsdp.discover import find_units
from overlap_pass.fsdp.gather import GatherSpec

__all__ = ["MINIMUM_TORCH", "ParameterSpec", "UnitSpec", "inspect"]

MINIMUM_TORCH = (2, 11)

# Prefixes that wrappers put into qualified names and that checkpoints do not have.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: how it is gathered, and what torch knows of it."""

    view: compat.ParameterView
    gather: GatherSpec


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One ``fully_shard`` call, as it will be converted.

    Attributes:
        fqn: qualified names of its modules, ``""`` for the model itself.
        reshard: gather again in backward.
        reduction: which of a gradient's reductions a backward does.
        input_dtype, output_dtype: what floating-point tensors are cast to at the door, ``None`` for nothing.
        device: where the root's inputs are moved, ``None`` for nowhere.
    """

    view: compat.UnitView
    fqn: str
    reshard: bool
    reduction: dict[str, bool]
    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    device: torch.device | None
    parameters: tuple[ParameterSpec, ...]


def inspect(model: nn.Module) -> tuple[UnitSpec, ...]:
    """Every unit of the model that is under live FSDP2 hooks, as it will be converted; changes nothing.

    Raises:
        ConversionError: the model or a part of it cannot be converted; the message names the first reason.
    """
    if compat.torch_version() < MINIMUM_TORCH:
        raise ConversionError(f"torch {torch.__version__} is too old: overlap-pass needs 2.11 or newer")
    units = find_units(model)
    names = {module: _clean(name) for name, module in model.named_modules()}
    inner = _inner_states(units)
    reasons = [
        *_reasons_in_model(model, units),
        *chain.from_iterable(_reasons_in_unit(unit, names, outermost=id(unit.state) not in inner) for unit in units),
    ]
    if reasons:
        more = f" (and {len(reasons) - 1} more such reasons)" if len(reasons) > 1 else ""
        raise ConversionError(reasons[0] + more)
    return tuple(_unit_spec(unit, names, outermost=id(unit.state) not in inner) for unit in units)


def _reasons_in_model(model: nn.Module, units: tuple[compat.UnitView, ...]) -> Iterator[str]:
    if not units:
        name = type(model).__name__
        yield f"no module of {name} is under fully_shard(): call torch.distributed.fsdp.fully_shard on its blocks and on it"
        return
    meshes = [parameter.mesh for unit in units for group in unit.groups for parameter in group.parameters]
    if meshes and all(mesh is not None and mesh.shard_ranks * mesh.replicate_ranks == 1 for mesh in meshes):
        yield "nothing to overlap with 1 rank: run under torchrun with --nproc-per-node of 2 or more"


def _reasons_in_unit(unit: compat.UnitView, names: Mapping[nn.Module, str], *, outermost: bool) -> Iterator[str]:
    where = _unit_fqn(unit, names) or "the root module"
    if outermost and unit.is_root is False:
        yield f"{where}: is part of a larger FSDP2 model that has run already: convert that model's root"
    if not unit.idle:
        yield f"{where}: is in the middle of a forward or backward: convert between steps"
    for module in unit.modules:
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{where}: is a ScriptModule, whose class cannot be exchanged: use the Python module"
    for group in unit.groups:
        yield from (f"{where}: {reason}" for reason in _reasons_in_group(group))
        for parameter in group.parameters:
            owner, name = parameter.owners[0]
            fqn = _join(names.get(owner, ""), name)
            yield from (f"{fqn}: {reason}" for reason in _reasons_in_parameter(parameter))


def _reasons_in_group(group: compat.GroupView) -> Iterator[str]:
    if group.resharded_to_fewer_ranks:
        yield "reshard_after_forward is a number of ranks: use True or False"
    if group.custom_communication:
        yield "has a custom all-gather or reduce-scatter: the graph holds the plain ones; leave it out"
    if group.all_reduce_hook:
        yield "has an all-reduce hook, which a graph cannot call: use an HSDP mesh for replicas"
    if group.reduces_unused:
        yield "reduces gradients of unused parameters (set_reduce_scatter_unused_params): switch that off"
    if group.unshard_pending:
        yield "has an unshard() under way: convert between steps"
    if group.pending_gradient or any(parameter.pending_gradient for parameter in group.parameters):
        yield "holds gradients that are not reduced yet: convert behind an optimizer step"


def _reasons_in_parameter(parameter: compat.ParameterView) -> Iterator[str]:
    if parameter.mesh is None:
        yield "is under replicate(), not sharded: use fully_shard, or DistributedDataParallel without overlap-pass"
    if parameter.offloaded:
        yield "is offloaded to the CPU (CPUOffloadPolicy): shard without an offload policy"
    if parameter.extended:
        yield "has an all-gather extension (fsdp_pre_all_gather, as float8 uses): shard plain tensors"
    if parameter.on_spmd_mesh:
        yield "was sharded with dp_mesh_dims: pass the data-parallel submesh as mesh instead"


def _inner_states(units: tuple[compat.UnitView, ...]) -> set[int]:
    """Ids of the states that lie inside another's module."""
    inner: set[int] = set()
    for unit in units:
        for module in unit.modules:
            found = (compat.live_state(below) for below in module.modules())
            inner |= {id(state) for state in found if state is not None and state is not unit.state}
    return inner


def _unit_spec(unit: compat.UnitView, names: Mapping[nn.Module, str], *, outermost: bool) -> UnitSpec:
    fqn = _unit_fqn(unit, names)
    becomes_root = outermost and unit.is_root is None
    # What the first forward would do: a root that was not told otherwise keeps its parameters for the backward.
    reshard = any(group.reshard for group in unit.groups) and not (becomes_root and unit.auto_reshard)
    is_root = becomes_root or bool(unit.is_root)
    return UnitSpec(
        view=unit,
        fqn=fqn,
        reshard=reshard,
        reduction={
            "reduces": all(group.reduces for group in unit.groups),
            "all_reduces": all(group.all_reduces for group in unit.groups),
        },
        input_dtype=unit.param_dtype if unit.cast_forward_inputs else None,
        output_dtype=unit.output_dtype,
        device=unit.device if is_root and unit.device.type != "cpu" else None,
        parameters=tuple(
            ParameterSpec(parameter, _gather_spec(unit, group, parameter, names))
            for group in unit.groups
            for parameter in group.parameters
        ),
    )


def _gather_spec(
    unit: compat.UnitView, group: compat.GroupView, parameter: compat.ParameterView, names: Mapping[nn.Module, str]
) -> GatherSpec:
    mesh = parameter.mesh
    if mesh is None:
        raise ValueError("parameters that are not sharded are refused before")
    owner, name = parameter.owners[0]
    return GatherSpec(
        unit=_unit_fqn(unit, names),
        parameter=_join(names.get(owner, ""), name),
        shape=parameter.shape,
        shard_dim=parameter.shard_dim,
        padded_rows=parameter.padded_rows,
        param_dtype=unit.param_dtype,
        # FSDP2 reduces in the gradient's dtype where the policy's two dtypes are equal.
        reduce_dtype=unit.reduce_dtype if unit.reduce_dtype != unit.param_dtype else None,
        shard_group=mesh.shard_group,
        shard_ranks=mesh.shard_ranks,
        reduce_group=mesh.reduce_group,
        # An average over one replica is the value itself.
        replicate_group=mesh.replicate_group if mesh.replicate_ranks > 1 else None,
        replicate_ranks=mesh.replicate_ranks,
        divide_factor=group.gradient_divide_factor,
        sum_only=group.sum_only,
    )


def _unit_fqn(unit: compat.UnitView, names: Mapping[nn.Module, str]) -> str:
    return ", ".join(names.get(module, "") for module in unit.modules)


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = f"{name}.".replace(wrapper, "").removesuffix(".")
    return name
