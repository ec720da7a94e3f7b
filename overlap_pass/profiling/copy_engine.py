"""All-gathers by copy engine, measured with the carrier that compiled models use (``transport="copy_engine"``)."""

from __future__ import annotations

import math

import torch

from overlap_pass.cost.hardware import CopyEngine
from overlap_pass.errors import EnvironmentRefused, TransportError
from overlap_pass.memory.places import aligned, tenancies
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.collective_rates import Group, beside_gemm
from overlap_pass.profiling.stopwatch import Run, Stopwatch
from overlap_pass.transport import driver
from overlap_pass.transport.choice import why_not_by_copy

__all__ = ["copy_engine"]

_SMALL_BYTES = 64 * 2**10
_IN_A_ROW = 50


def copy_engine(group: Group, scale: Scale, watch: Stopwatch) -> CopyEngine:
    """Measure gathers by copy between the GPUs of one group.

    Raises:
        EnvironmentRefused: why these GPUs cannot copy from each other, or have no symmetric memory to do so.
    """
    if watch.device.type != "cuda":
        raise EnvironmentRefused("copies between GPUs need CUDA devices")
    if (reason := why_not_by_copy(group.process_group.group_name)) is not None:
        raise EnvironmentRefused(reason)
    try:
        return _measured(group, scale, watch)
    except (ImportError, AttributeError, RuntimeError, TransportError) as error:
        reason = str(error).partition("\n")[0]
        raise EnvironmentRefused(f"symmetric memory is not available: {type(error).__name__}: {reason}") from error


def _measured(group: Group, scale: Scale, watch: Stopwatch) -> CopyEngine:
    small = _gather(_SMALL_BYTES, group, watch.device)
    copies = _copies(scale.gather_bytes, group, watch.device)
    factors = beside_gemm(copies, scale, watch)
    crossing_bytes = scale.gather_bytes * (group.ranks - 1) / group.ranks
    return CopyEngine(
        bandwidth_gb_per_s=crossing_bytes / watch.queued_us(copies, 4) / 1e3,
        latency_us=watch.recorded_us(small, 30),  # a launch takes the CPU longer than the device
        launch_us=watch.issued_us(small, scale.launches // 2),
        handshake_us=_handshake_us(watch),
        compute_beside_communication=factors.compute_beside_communication,
        communication_beside_compute=factors.communication_beside_compute,
    )


def _handshake_us(watch: Stopwatch) -> float:
    """What a kernel behind another takes longer where it also waits for words that another stream has written long before."""
    memory = torch.zeros(256, dtype=torch.int32, device=watch.device)
    words = driver.Words(writes=[(memory.data_ptr(), 0)])
    beside, side = torch.zeros_like(memory), torch.cuda.Stream()

    def kernel() -> object:
        return beside.add_(1)

    def kernels_and_words() -> object:
        here, written = torch.cuda.current_stream(), []
        for _ in range(_IN_A_ROW):
            if len(written) > 1:
                here.wait_event(written[-2])
            kernel()
            side.wait_event(here.record_event())
            driver.submit(side, words)
            written.append(side.record_event())
        here.wait_event(written[-1])
        return beside

    return max(0.0, watch.recorded_us(kernels_and_words, 1) / _IN_A_ROW - watch.recorded_us(kernel, _IN_A_ROW))


def _copies(payload_bytes: int, group: Group, device: torch.device) -> Run:
    """The copies of a gather alone: the cast before them is a kernel, which plans price on its own.

    What is copied is whatever lies in the peers' staging memory, which nobody writes to meanwhile.
    """
    from overlap_pass.transport.peers import channel

    line = channel(group.process_group.group_name, "gather", device)
    size_bytes = aligned(payload_bytes // group.ranks)
    staging = line.staging(size_bytes)
    fetched = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def copy() -> object:
        for peer in line.peers:
            driver.copy(torch.cuda.current_stream(), fetched.data_ptr(), staging.addresses[peer], size_bytes)
        return fetched

    return copy


def _gather(payload_bytes: int, group: Group, device: torch.device) -> Run:
    """A call that gathers a bf16 tensor of so many bytes and waits."""
    from overlap_pass.transport.copy_engine import start_gather

    shard = torch.zeros(math.ceil(payload_bytes / 2 / group.ranks), dtype=torch.bfloat16, device=device)
    name = group.process_group.group_name
    (tenancy,) = tenancies([shard.nbytes], leaves_nothing=True)  # each call waits, so one place is enough

    def gather() -> object:
        (full,) = start_gather([shard], torch.bfloat16, name, tenancy.place)
        return torch.ops._c10d_functional.wait_tensor(full)

    return gather
