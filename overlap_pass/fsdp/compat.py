"""The only file that touches private parts of torch's FSDP2: they are read here into plain records.

Written against torch 2.11 and 2.13. ``absent_internals`` names what a newer torch has renamed or removed, so that such
a torch gives one clear error instead of an ``AttributeError`` in the middle of a conversion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from importlib import import_module
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DeviceMesh, Placement

__all__ = [
    "GroupView",
    "MeshView",
    "ParameterView",
    "TensorParallelView",
    "UnitView",
    "absent_internals",
    "after_backward",
    "backward_running",
    "fsdp_marks",
    "fsdp_source",
    "forward_hooks",
    "live_state",
    "may_compile",
    "original_class",
    "reset_parameter",
    "reshard",
    "torch_version",
    "view",
    "without_own_graph",
]

_F = TypeVar("_F", bound=Callable[..., Any])

_FSDP = "torch.distributed.fsdp._fully_shard"

# Module attributes, as (module, dotted name).
_NAMES = (
    ("torch._C", "_current_graph_task_id"),
    ("torch._C._dynamo.eval_frame", "get_eval_frame_callback"),
    ("torch._dynamo", "optimize"),
    ("torch._dynamo.eval_frame", "skip_code"),
    ("torch._dynamo.source", "FSDPNNModuleSource"),
    ("torch.distributed._composable_state", "_module_state_mapping"),
    (f"{_FSDP}._fsdp_collectives", "DefaultAllGather"),
    (f"{_FSDP}._fsdp_collectives", "DefaultReduceScatter"),
    (f"{_FSDP}._fsdp_common", "FSDPMeshInfo"),
    (f"{_FSDP}._fsdp_common", "HSDPMeshInfo"),
    (f"{_FSDP}._fsdp_common", "TrainingState.IDLE"),
    (f"{_FSDP}._fsdp_param", "FSDPParam.reset_sharded_param"),
    (f"{_FSDP}._fsdp_param_group", "FSDPParamGroup._to_sharded"),
    (f"{_FSDP}._fsdp_state", "_get_module_fsdp_state"),
    (f"{_FSDP}._fully_shard", "FSDPModule._orig_cls_mro_index"),
)

# Attributes of instances; a tuple lists the spellings of different versions.
_STATE = (
    "_modules", "_mp_policy", "_device", "_is_root", "_auto_reshard_after_forward", "_training_state",
    "_pre_forward_hook_handle", "_post_forward_hook_handle", ("_fsdp_param_groups", "_fsdp_param_group"),
)  # fmt: skip
_GROUP = (
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "_use_post_forward_mesh", "is_sharded", "_all_gather_result",
    "_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook", "_partial_reduce_output", "reduce_grads",
    "all_reduce_grads", "gradient_divide_factor", "force_sum_reduction_for_comms",
)  # fmt: skip
_PARAMETER = (
    "_module_info", "sharded_param", "_orig_size", "fsdp_placement", "padded_sharded_param_size", "offload_to_cpu",
    "is_dtensor", "unsharded_accumulated_grad",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class MeshView:
    """The process groups of one parameter: it is sharded over one and, under HSDP, replicated over another.

    ``reduce_group`` is where its gradient is reduce-scattered: the shard group, or a group of its own.
    """

    shard_group: str
    shard_ranks: int
    reduce_group: str
    replicate_group: str | None
    replicate_ranks: int


@dataclass(frozen=True, slots=True)
class TensorParallelView:
    """How the gathered parameter is itself a DTensor over the tensor-parallel mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterView:
    """One sharded parameter.

    Attributes:
        fsdp_param: torch's own record of it.
        tensor: the sharded ``nn.Parameter`` that the optimizer holds.
        owners: each (module, attribute name) that it is registered under; several when it is tied.
        shape: of the gathered parameter (of this rank's part of it, under tensor parallelism).
        shard_dim: the dimension that is sharded.
        padded_rows: rows of a shard along dimension 0 with padding: what each rank sends.
        mesh: ``None`` where the parameter is not sharded at all (``replicate``).
    """

    fsdp_param: Any
    tensor: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    shard_dim: int
    padded_rows: int
    offloaded: bool
    extended: bool
    on_spmd_mesh: bool
    pending_gradient: bool
    mesh: MeshView | None
    tensor_parallel: TensorParallelView | None


@dataclass(frozen=True, slots=True)
class GroupView:
    """Parameters of one unit that eager FSDP2 gathers together."""

    fsdp_group: Any
    parameters: tuple[ParameterView, ...]
    reshard: bool
    resharded_to_fewer_ranks: bool
    unshard_pending: bool
    custom_communication: bool
    all_reduce_hook: bool
    reduces: bool
    all_reduces: bool
    pending_gradient: bool
    gradient_divide_factor: float | None
    sum_only: bool
    reduces_unused: bool


@dataclass(frozen=True, slots=True)
class UnitView:
    """What one call of ``fully_shard`` made: the modules, their mixed precision, their parameters.

    ``is_root`` is ``None`` until the model has run once: the first module to run forward becomes the root.
    """

    state: Any
    modules: tuple[nn.Module, ...]
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    cast_forward_inputs: bool
    device: torch.device
    is_root: bool | None
    auto_reshard: bool
    idle: bool
    groups: tuple[GroupView, ...]


def torch_version() -> tuple[int, int]:
    """``(2, 13)`` for ``2.13.0+cpu``."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def absent_internals(states: Iterator[Any] | tuple[Any, ...] = ()) -> tuple[str, ...]:
    """Names of torch internals that this file needs and this torch lacks, also on the given FSDP states."""
    absent = [f"{module}.{name}" for module, name in _NAMES if not _has(module, name)]
    for state in states:
        absent += _lacking(state, _STATE)
        for group in _groups(state):
            absent += _lacking(group, _GROUP)
            for parameter in getattr(group, "fsdp_params", ()):
                absent += _lacking(parameter, _PARAMETER)
    return tuple(dict.fromkeys(absent))


def _has(module: str, name: str) -> bool:
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True


def _lacking(instance: Any, names: tuple[str | tuple[str, ...], ...]) -> list[str]:
    spellings = [(name,) if isinstance(name, str) else name for name in names]
    return [
        f"{type(instance).__name__}.{names[0]}"
        for names in spellings
        if not any(hasattr(instance, name) for name in names)
    ]


def live_state(module: nn.Module) -> Any | None:
    """The FSDP2 state that ``fully_shard`` (or ``replicate``) attached to the module, ``None`` without one."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    return _get_module_fsdp_state(module)


def view(state: Any) -> UnitView:
    """Read a state; changes nothing."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    policy = state._mp_policy
    return UnitView(
        state=state,
        modules=tuple(state._modules),
        param_dtype=policy.param_dtype,
        reduce_dtype=policy.reduce_dtype,
        output_dtype=policy.output_dtype,
        cast_forward_inputs=policy.cast_forward_inputs,
        device=state._device,
        is_root=state._is_root,
        auto_reshard=bool(state._auto_reshard_after_forward),
        idle=state._training_state is TrainingState.IDLE,
        groups=tuple(_group_view(group) for group in _groups(state)),
    )


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # 2.13
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)  # 2.11
        groups = [] if group is None else [group]
    return list(groups)


def _group_view(group: Any) -> GroupView:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    default = type(group._all_gather_comm) is DefaultAllGather and (
        type(group._reduce_scatter_comm) is DefaultReduceScatter
    )
    return GroupView(
        fsdp_group=group,
        parameters=tuple(_parameter_view(parameter, group) for parameter in group.fsdp_params),
        reshard=group.post_forward_mesh_info is not None,
        resharded_to_fewer_ranks=group._use_post_forward_mesh,
        unshard_pending=group._all_gather_result is not None,
        custom_communication=not default,
        all_reduce_hook=group._all_reduce_hook is not None,
        reduces=group.reduce_grads,
        all_reduces=group.all_reduce_grads,
        pending_gradient=group._partial_reduce_output is not None,
        gradient_divide_factor=group.gradient_divide_factor,
        sum_only=group.force_sum_reduction_for_comms,
        reduces_unused=getattr(group, "reduce_scatter_unused_params", False),
    )


def _parameter_view(parameter: Any, group: Any) -> ParameterView:
    info = parameter._module_info
    owners = ((info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True))
    # While the group is sharded, what is registered counts: it may have been replaced since fully_shard().
    tensor = info.module._parameters[info.param_name] if group.is_sharded else parameter.sharded_param
    mesh = getattr(parameter, "mesh_info", group.mesh_info)
    return ParameterView(
        fsdp_param=parameter,
        tensor=tensor,
        owners=owners,
        shape=tuple(parameter._orig_size),
        shard_dim=parameter.fsdp_placement.dim,
        padded_rows=parameter.padded_sharded_param_size[0],
        offloaded=parameter.offload_to_cpu,
        extended=hasattr(getattr(tensor, "_local_tensor", tensor), "fsdp_pre_all_gather"),
        on_spmd_mesh=getattr(mesh, "is_spmd_mesh", False),
        pending_gradient=_has_pending_gradient(parameter),
        mesh=_mesh_view(mesh),
        tensor_parallel=_tensor_parallel_view(parameter) if parameter.is_dtensor else None,
    )


def _has_pending_gradient(parameter: Any) -> bool:
    """Whether a backward without reduction has left a gradient beside the shard's."""
    unsharded = getattr(parameter, "_unsharded_param", None)  # absent before the first gather
    return parameter.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


def _mesh_view(mesh: Any) -> MeshView | None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    if not isinstance(mesh, FSDPMeshInfo):
        return None
    replicated = isinstance(mesh, HSDPMeshInfo)
    reduce_group = getattr(mesh, "reduce_scatter_process_group", None) or mesh.shard_process_group
    return MeshView(
        shard_group=mesh.shard_process_group.group_name,
        shard_ranks=mesh.shard_mesh_size,
        reduce_group=reduce_group.group_name,
        replicate_group=mesh.replicate_process_group.group_name if replicated else None,
        replicate_ranks=mesh.replicate_mesh_size if replicated else 1,
    )


def _tensor_parallel_view(parameter: Any) -> TensorParallelView:
    spec = getattr(parameter, "_unsharded_dtensor_spec", None) or parameter._tp_spec  # 2.13, 2.11
    return TensorParallelView(
        mesh=spec.mesh,
        placements=tuple(spec.placements),
        shape=spec.tensor_meta.shape,
        stride=tuple(spec.tensor_meta.stride),
    )


def forward_hooks(state: Any, module: nn.Module) -> tuple[int, int]:
    """Ids of FSDP2's forward pre-hook and forward hook in the module's two hook dictionaries."""
    pre, post = state._pre_forward_hook_handle, state._post_forward_hook_handle
    # For a list of modules, both attributes hold one handle that groups the handles of all modules.
    ids = {handle.id for handle in (*getattr(pre, "handles", (pre,)), *getattr(post, "handles", (post,)))}
    (before,) = ids & module._forward_pre_hooks.keys()
    (after,) = ids & module._forward_hooks.keys()
    return before, after


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module had before ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule

    cls = type(module)
    return cls.__mro__[cls._orig_cls_mro_index] if issubclass(cls, FSDPModule) else cls


def fsdp_marks(module: nn.Module) -> Iterator[tuple[MutableMapping[Any, Any], Any]]:
    """Entries, as (mapping, key), by which torch recognises the module as FSDP2's.

    The entry in torch's registry of applied APIs stays: ``fully_shard`` of a converted module is still refused.
    """
    from torch.distributed._composable_state import _module_state_mapping

    if module in _module_state_mapping:
        yield _module_state_mapping, module
    for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
        if name in module.__dict__:
            yield module.__dict__, name


def reshard(group: GroupView) -> None:
    """Register the sharded parameters again where a forward has left the gathered ones."""
    group.fsdp_group._to_sharded()


def reset_parameter(parameter: ParameterView) -> None:
    """Tell FSDP2 about a parameter tensor that may have been replaced (``to_empty``, ``load_state_dict``)."""
    parameter.fsdp_param.reset_sharded_param()


def fsdp_source(source: Any) -> str | None:
    """The module that a Dynamo source leads to, as Python would reach it, if torch treats that as an FSDP2 module."""
    from torch._dynamo.source import FSDPNNModuleSource

    while source is not None:
        if isinstance(source, FSDPNNModuleSource):
            return str(source.name() if callable(source.name) else source.name)
        source = getattr(source, "base", None)
    return None


def without_own_graph(function: _F) -> _F:
    """Decorator: Dynamo never starts a graph at this function; called inside one, it is traced like any other."""
    from torch._dynamo.eval_frame import skip_code

    codes = [function.__code__]
    while codes:
        code = codes.pop()
        skip_code(code)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return function


def backward_running() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def after_backward(function: Callable[[], None]) -> None:
    """Called in a hook of backward: have ``function`` called when that backward is through."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def may_compile(function: Callable[..., Any]) -> bool:
    """Whether Dynamo would look at a Python function that is called now: under ``torch.compile``, outside of its graphs."""
    from torch._C._dynamo.eval_frame import get_eval_frame_callback

    return get_eval_frame_callback() is not None and not getattr(function, "_torchdynamo_disable", False)
