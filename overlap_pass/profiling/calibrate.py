"""``calibrate``: the hardware file of the machine at hand, measured on all ranks at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlap_pass.cost.calibration import Calibration, Measurements, calibrated
from overlap_pass.cost.hardware import CopyEngine, Hardware
from overlap_pass.errors import EnvironmentRefused, OptionError
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.collective_rates import Group, collective_launch_us, collective_samples, contention
from overlap_pass.profiling.copy_engine import copy_engine
from overlap_pass.profiling.environment import device_name
from overlap_pass.profiling.kernel_rates import (
    attention_samples,
    gemm_samples,
    kernel_launch_us,
    least_kernel_us,
    stream_samples,
)
from overlap_pass.profiling.stopwatch import Stopwatch

__all__ = ["calibrate", "groups"]

Report = Callable[[str], None]


def calibrate(
    base: Hardware,
    device: torch.device,
    *,
    mesh: Sequence[int] = (),
    scale: Scale | None = None,
    progress: Report = lambda _: None,
) -> Calibration:
    """Measure this machine; every rank calls it, and every rank gets the same result.

    Args:
        base: a machine of the same kind, for its datasheet and for what cannot be measured here.
        device: this rank's.
        mesh: shape of a device mesh whose groups are measured beside the world's.
        scale: how much; by default all of it on GPUs and a rehearsal on CPUs.

    Raises:
        EnvironmentRefused: fewer than two ranks.
        OptionError: the mesh does not have as many places as there are ranks.
    """
    if dist.get_world_size() < 2:
        raise EnvironmentRefused("calibrate needs at least 2 ranks (1 found): with one rank nothing is communicated")
    scale = scale or (Scale.full() if device.type == "cuda" else Scale.rehearsal())
    watch = Stopwatch(device, scale.batches)
    found = _measure(groups(mesh), scale, watch, progress)
    return calibrated(found, base, _name(device))


def groups(mesh: Sequence[int] = ()) -> tuple[Group, ...]:
    """The world, the ranks of this node if that is another group, and the groups that this rank has in a mesh."""
    ranks = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    found = [Group("world", dist.group.WORLD, min(per_node, ranks))]
    if 1 < per_node < ranks:
        process_group, _ = dist.new_subgroups(per_node)
        found.append(Group("node", process_group, per_node))
    if mesh:
        places = torch.tensor(mesh).prod().item()
        if places != ranks:
            raise OptionError(f"mesh={'x'.join(map(str, mesh))} has {places} places for {ranks} ranks")
        names = tuple(f"dimension {number}" for number in range(len(mesh)))
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        built = init_device_mesh(device_type, tuple(mesh), mesh_dim_names=names)
        for number, name in enumerate(names):
            if 1 < mesh[number] < ranks:
                process_group = built.get_group(number)
                nodes = {rank // per_node for rank in dist.get_process_group_ranks(process_group)}
                found.append(Group(name, process_group, mesh[number] // len(nodes)))
    return tuple(found)


def _measure(where: Sequence[Group], scale: Scale, watch: Stopwatch, progress: Report) -> Measurements:
    cuda = watch.device.type == "cuda"
    # A kernel's rates before collectives: a device that has waited for peers is cooler than one that trains.
    progress("matrix products, attention, memory")
    kernels = {
        "gemms": tuple(gemm_samples(scale, watch)),
        "attention": tuple(attention_samples(scale, watch)),
        "streams": tuple(stream_samples(scale, watch)),
        "least_kernel_us": least_kernel_us(scale, watch),
    }
    collectives = []
    for group in where:
        progress(f"collectives of {group.ranks} ranks ({group.name})")
        collectives += collective_samples(group, scale, watch)
    progress("launches")
    launches = {
        "kernel_launch_us": kernel_launch_us(scale, watch),
        "collective_launch_us": collective_launch_us(where[0], scale, watch),
    }
    beside, engine, left_out = {}, None, []
    if cuda:
        progress("collectives beside matrix products")
        kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
        beside = {kind: contention(kind, where[0], scale, watch) for kind in kinds}
    else:
        left_out.append("contention: a CPU runs one after the other")
    progress("gathers by copy engine")
    engine, reason = _copy_engine(where, scale, watch)
    if reason:
        left_out.append(f"copy engine: {reason}")
    return Measurements(
        **kernels,  # type: ignore[arg-type]
        **launches,
        collectives=tuple(collectives),
        contention=beside,
        copy_engine=engine,
        copies=engine is not None,
        capacity_bytes=torch.cuda.get_device_properties(watch.device).total_memory if cuda else None,
        left_out=tuple(left_out),
    )


def _copy_engine(where: Sequence[Group], scale: Scale, watch: Stopwatch) -> tuple[CopyEngine | None, str]:
    """Gathers by copy within a node, or why not; the same on all ranks."""
    group = next((one for one in where if one.ranks == one.ranks_per_node), None)
    if group is None:
        return None, "no group within one node was measured"
    found, reason = None, ""
    try:
        found = copy_engine(group, scale, watch)
    except EnvironmentRefused as error:
        reason = str(error)
    reasons = [reason] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    reason = next(filter(None, reasons), "")
    return (None, reason) if reason else (found, "")


def _name(device: torch.device) -> str:
    """``"NVIDIA H200"``, with how its ranks reach each other where that is not the fast link."""
    found = device_name() if device.type == "cuda" else "CPU"
    return f"{found}, peer-to-peer off" if os.environ.get("NCCL_P2P_DISABLE") == "1" else str(found)
