"""What the names of ops and kernels say: each question is answered once per name, however many events have it."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = [
    "copies_for_peers",
    "function_of",
    "is_collective_kernel",
    "is_copy_kernel",
    "is_helper",
    "is_peer_copy",
    "issues_collective",
    "shape_of",
]

_by_name = lru_cache(maxsize=1 << 14)

# Older ROCm runs copies and fills as kernels.
_COPY_KERNEL = re.compile(r"__amd_rocclr_(copy|fill)buffer|memory_copy_", re.IGNORECASE)

_COLLECTIVE_OP = re.compile(r"record_param_comms$|c10d::|_c10d_functional::|symm_mem::|nccl:")
_COLLECTIVE_KERNEL = re.compile(
    r"""(?:^|::)(?:
        nccl\w*kernel | rccl | mscclkernel                              # NCCL, RCCL, MSCCL, symmetric ones included
      | multimem_(?:all_reduce|one_shot|all_gather|reduce_scatter)      # symmetric memory through NVSwitch
      | (?:one|two)_shot_all_reduce | cross_device_reduce               # peer-to-peer all-reduces
      | nvshmem | deep_ep::
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_COPYING_OP = re.compile(r"overlap_pass::(?:gather|exchange)_start")
# FSDP's copies into and out of the buffer of a collective: they use the SMs, so they compute, on its behalf.
_HELPER_HOOK = re.compile(r"FSDP::all_gather|FSDP::post_backward_reduce")
_HELPER_OP = re.compile(r"fsdp::|aten::(?:split_with_sizes_copy|_?chunk_cat)")


@_by_name
def issues_collective(op: str) -> bool:
    """Whether a CPU op of this name issues a collective."""
    return bool(_COLLECTIVE_OP.match(op))


@_by_name
def copies_for_peers(op: str) -> bool:
    """Whether the copies that this CPU op starts are a collective by copy engine; its kernels only prepare it."""
    return bool(_COPYING_OP.match(op))


@_by_name
def is_helper(op: str, hook: str | None) -> bool:
    """Whether a kernel launched by this op, inside this hook of FSDP, copies into or out of a collective's buffer."""
    return bool(_HELPER_OP.match(op) or (hook and _HELPER_HOOK.match(hook)))


@_by_name
def shape_of(name: str, grid: str) -> str:
    """What two runs of the same work share."""
    return f"{name} {grid}"


@_by_name
def is_collective_kernel(kernel: str) -> bool:
    """Whether a kernel of this name is a collective's."""
    return bool(_COLLECTIVE_KERNEL.search(function_of(kernel)))


@_by_name
def is_peer_copy(copy: str) -> bool:
    """Whether a memory copy of this name goes from one device to another, which only communication does.

    Kineto records no call of the driver that starts such a copy, so that no CPU op tells.
    """
    return copy.startswith("Memcpy PtoP")


@_by_name
def is_copy_kernel(kernel: str) -> bool:
    """Whether a kernel of this name copies or fills memory, as the runtime does."""
    return bool(_COPY_KERNEL.match(kernel))


def function_of(name: str) -> str:
    """The qualified function of a C++ signature: without return type, template arguments and parameters; any other name stays.

    >>> function_of("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)")
    'multimem_all_reduce_kernel'
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare, maxsplit=1)[0]
