"""Turning a ``fully_shard`` model into one whose collectives stand in its graph, and back.

FSDP2 gathers parameters in hooks that no compiler sees. The conversion exchanges these hooks for a property per
parameter, which reads as the gathered tensor while the module computes. Parameters, their names, the state dict, the
optimizer and checkpoints stay what they were: the ``nn.Parameter`` objects are not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn
from torch._dynamo import OptimizedModule

from overlap_pass.errors import ConversionError
from overlap_pass.fsdp import compat
from overlap_pass.fsdp.accumulation import Accumulator
from overlap_pass.fsdp.discover import has_live_units
from overlap_pass.fsdp.inspection import ParameterSpec, UnitSpec, inspect
from overlap_pass.fsdp.journal import Journal
from overlap_pass.fsdp.module import READS, UNIT, OverlapModule, converted_class
from overlap_pass.fsdp.unit import ParameterRead, Run, Unit

__all__ = ["is_traceable", "make_traceable", "restore"]

# Key in the ``__dict__`` of the module that make_traceable() was called on: how to go back.
_CONVERSION = "_overlap_conversion"


def is_traceable(model: nn.Module) -> bool:
    """Whether all of the model's FSDP2 collectives would stand in its graph."""
    return any(isinstance(module, OverlapModule) for module in model.modules()) and not has_live_units(model)


def make_traceable(model: nn.Module) -> nn.Module:
    """Convert a ``fully_shard`` model in place, so that its all-gathers and reduce-scatters stand in the FX graph.

    Numbers, parameters, state dict, optimizer and checkpoints stay as they were. A model that is converted already is
    returned as it is. :func:`restore` takes everything back.

    Args:
        model: a module with ``fully_shard`` modules inside, called between two steps.

    Returns:
        The same object.

    Raises:
        ConversionError: a part cannot be converted; the message names it and the reason. Nothing has been changed then.
    """
    if not isinstance(model, nn.Module):
        raise ConversionError(f"make_traceable() takes an nn.Module, not {type(model).__name__}")
    if is_traceable(model):
        return model
    specs = inspect(model)
    journal = Journal()
    try:
        _apply(specs, journal)
        journal.set_entry(model.__dict__, _CONVERSION, (specs, journal))
    except Exception as error:
        journal.undo()
        raise ConversionError(
            f"conversion of {type(model).__name__} failed ({type(error).__name__}: {error}); the model is as it was"
        ) from error
    except BaseException:
        journal.undo()
        raise
    return model


def restore(model: nn.Module) -> nn.Module:
    """Give a converted model its FSDP2 hooks back, in place; a model that was not converted is returned as it is.

    Parameters that were replaced meanwhile (``to_empty``, ``load_state_dict(assign=True)``) and what
    ``set_reshard_after_forward`` or ``set_requires_gradient_sync`` has changed stay.

    Raises:
        ConversionError: gradients of micro-batches still wait to be reduced. Nothing has been changed then.
    """
    for module in model.modules():
        if (unit := module.__dict__.get(UNIT)) is not None and unit.pending:
            raise ConversionError(
                f"{unit.fqn or 'the root module'} holds gradients that are not reduced yet: restore behind an optimizer step"
            )
    for module in list(model.modules()):
        if (conversion := module.__dict__.get(_CONVERSION)) is not None:
            _take_back(*conversion)
    return model


def _apply(specs: tuple[UnitSpec, ...], journal: Journal) -> None:
    reads: dict[nn.Module, dict[str, ParameterRead]] = {}
    run = Run()
    for spec in specs:
        unit = _unit(spec, run)
        for parameter in spec.parameters:
            read = _read(unit, parameter)
            unit.owned.append((*parameter.view.owners[0], read))
            for module, name in parameter.view.owners:
                reads.setdefault(module, {})[name] = read
        unit.set_reduction(**spec.reduction)
        for module in spec.view.modules:
            _exchange_hooks(module, spec, unit, journal)
    for module, own in reads.items():
        journal.set_entry(module.__dict__, READS, module.__dict__.get(READS, {}) | own)
    units = dict.fromkeys(_home(module) for spec in specs for module in spec.view.modules)
    for module in units | reads | _holders(units, reads):
        names = tuple(sorted(reads.get(module, {})))
        journal.set_class(module, converted_class(compat.original_class(module), names, unit=module in units))
    # Last, since a journal cannot take it back: a root keeps gathered parameters registered behind its forward.
    for spec in specs:
        for group in spec.view.groups:
            compat.reshard(group)


def _holders(units: Iterable[nn.Module], reads: Mapping[nn.Module, object]) -> dict[nn.Module, None]:
    """The user's modules that hold parameters only through others: their forward may ask for ``self.parameters()``.

    Torch's own containers and wrappers never do, and stay.
    """
    below = dict.fromkeys(module for unit in units for module in unit.modules())
    return {
        module: None
        for module in below
        if not type(module).__module__.startswith("torch.") and any(part in reads for part in module.modules())
    }


def _unit(spec: UnitSpec, run: Run) -> Unit:
    return Unit(
        spec.fqn,
        reshard=spec.reshard,
        input_dtype=spec.input_dtype,
        output_dtype=spec.output_dtype,
        device=spec.device,
        run=run,
    )


def _read(unit: Unit, parameter: ParameterSpec) -> ParameterRead:
    return ParameterRead(
        unit,
        parameter.gather.parameter,
        parameter.gather.to_json(),
        replace(parameter.gather, ahead=True).to_json(),
        parameter.gather.replicate_group is not None,
        parameter.view.tensor_parallel,
        Accumulator(parameter.gather.parameter),
    )


def _home(module: nn.Module) -> nn.Module:
    """Where a unit's hooks belong: graphs are traced through the wrapper of ``torch.compile(block)``, past its hooks."""
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def _exchange_hooks(module: nn.Module, spec: UnitSpec, unit: Unit, journal: Journal) -> None:
    before, after = compat.forward_hooks(spec.view.state, module)
    home = _home(module)
    if home is module:
        # Under their ids the hooks keep their places among the user's own.
        journal.set_entry(module._forward_pre_hooks, before, unit.pre_forward)
    else:
        journal.set_entry(module._forward_pre_hooks, before, _nothing)
        journal.set_entry(module._forward_hooks, after, _nothing)
        journal.set_class(module, compat.original_class(module))
        journal.set_first(home._forward_pre_hooks, before, unit.pre_forward)
        journal.set_entry(home._forward_pre_hooks_with_kwargs, before, True)
    journal.set_entry(home._forward_hooks, after, unit.post_forward)
    # Also when forward raises, or the unit would count as running for ever.
    journal.set_entry(home._forward_hooks_always_called, after, True)
    journal.set_entry(home.__dict__, UNIT, unit)
    for managed in module.modules():
        for mapping, key in list(compat.fsdp_marks(managed)):
            journal.drop_entry(mapping, key)


def _nothing(*_: object, **__: object) -> None:
    """A hook in the place of another, which comes back there."""


def _take_back(specs: tuple[UnitSpec, ...], journal: Journal) -> None:
    units = [(spec, module, _home(module).__dict__[UNIT]) for spec in specs for module in spec.view.modules]
    journal.undo()
    for spec in specs:
        for parameter in spec.parameters:
            compat.reset_parameter(parameter.view)
    for spec, module, unit in units:
        if unit.reshard != spec.reshard:
            module.set_reshard_after_forward(unit.reshard, recurse=False)
        module.set_requires_gradient_sync(unit.reduces, recurse=False)
        module.set_requires_all_reduce(unit.all_reduces, recurse=False)
