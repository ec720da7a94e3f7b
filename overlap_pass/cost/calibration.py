"""From what was measured on a machine to its hardware file: each number with where it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from overlap_pass.cost.collectives import collective_us, crossing_bytes
from overlap_pass.cost.contention import Contention
from overlap_pass.cost.fit import CollectiveSample, KernelSample, fit_efficiency, fit_link
from overlap_pass.cost.hardware import CopyEngine, Hardware, Link
from overlap_pass.graph.program import CollectiveKind

__all__ = ["Calibration", "Measurements", "Point", "calibrated"]

_FITTED = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
"""The kinds that FSDP is made of decide the link; the others are shown beside it."""

_LARGE_BYTES = 16 * 2**20
"""An all-to-all of so much is all transfer."""


@dataclass(frozen=True)
class Measurements:
    """What was measured; what was not is empty or ``None`` and stays as in the base file.

    Attributes:
        collectives: of groups within one node, and of groups over several.
        gemms, attention: bf16, ``amount`` in floating-point operations.
        streams: ``amount`` in bytes moved.
        least_kernel_us: a kernel that does nothing, in a queue.
        kernel_launch_us, collective_launch_us: of the CPU.
        contention: kind → how it and a GEMM slow each other down.
        copies: ``False`` where the GPUs cannot copy from each other, whatever the base file says.
        capacity_bytes: of the device memory.
        gpus_per_node: that share the fast link.
        left_out: what could not be measured and why.
    """

    collectives: tuple[CollectiveSample, ...] = ()
    gemms: tuple[KernelSample, ...] = ()
    attention: tuple[KernelSample, ...] = ()
    streams: tuple[KernelSample, ...] = ()
    least_kernel_us: float | None = None
    kernel_launch_us: float | None = None
    collective_launch_us: float | None = None
    contention: Mapping[CollectiveKind, Contention] = field(default_factory=dict)
    copy_engine: CopyEngine | None = None
    copies: bool = True
    capacity_bytes: int | None = None
    gpus_per_node: int | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """One measured time beside what the fitted file gives for it."""

    what: str
    measured_us: float
    model_us: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.model_us / self.measured_us - 1)


@dataclass(frozen=True)
class Calibration:
    """A fitted machine.

    Attributes:
        hardware: the machine.
        sources: ``"table.key"`` → where its number comes from.
        points: every measured time and the model's.
        left_out: what was not measured and why.
    """

    hardware: Hardware
    sources: Mapping[str, str]
    points: tuple[Point, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware.name,
            "points": [{**asdict(point), "error_percent": point.error_percent} for point in self.points],
            "left_out": list(self.left_out),
        }


def calibrated(found: Measurements, base: Hardware, name: str) -> Calibration:
    """The machine that was measured.

    Where contention was measured it has one speed, whether it rests or not: products and contention are measured at the power
    limit, and what a collective takes from a GEMM there is more than it takes from one on a device that rests.

    Args:
        base: a machine of the same kind, for the datasheet's figures and for what was not measured.
        name: what the file calls it.

    Raises:
        PlanError: times that no machine could have (they do not grow with the work).
    """
    tables = ("compute.peak_tflops", "memory", "node", "intra_node", "inter_node", "contention", "copy_engine")
    hardware, sources = base, dict.fromkeys(tables, f"as {base.name}")
    for step in (_compute, _memory, _links, _contentions):
        hardware, notes = step(found, hardware)
        sources.update(notes)
    speedup = None if found.contention else hardware.compute.rested_speedup
    hardware = replace(hardware, name=name, compute=replace(hardware.compute, rested_speedup=speedup))
    if found.copy_engine is not None or not found.copies:
        hardware = replace(hardware, copy_engine=found.copy_engine)
        sources["copy_engine"] = "measured"
    return Calibration(hardware, sources, tuple(_points(found, hardware)), found.left_out)


_Step = tuple[Hardware, dict[str, str]]


def _compute(found: Measurements, base: Hardware) -> _Step:
    compute, sources = base.compute, {}
    peak_per_us = base.peak_flops_per_us("bfloat16")
    changes: dict[str, Any] = {}
    if found.gemms:
        changes["matmul_efficiency"], changes["matmul_ramp_us"] = fit_efficiency(found.gemms, peak_per_us)
    if found.attention:
        start_us = changes.get("matmul_ramp_us", compute.matmul_ramp_us)
        rates = [sample.amount / max(sample.time_us - start_us, 1e-3) for sample in found.attention]
        changes["attention_efficiency"] = min(1.0, median(rates) / peak_per_us)
    for key, value in (
        ("kernel_us", found.least_kernel_us),
        ("kernel_launch_us", found.kernel_launch_us),
        ("collective_launch_us", found.collective_launch_us),
    ):
        if value is not None:
            changes[key] = value
    for key in ("matmul_efficiency", "attention_efficiency", "kernel_us", "matmul_ramp_us", "kernel_launch_us",
                "collective_launch_us", "rested_speedup"):  # fmt: skip
        sources[f"compute.{key}"] = "measured" if key in changes else f"as {base.name}"
    return replace(base, compute=replace(compute, **changes)), sources


def _memory(found: Measurements, base: Hardware) -> _Step:
    memory, sources = base.memory, {}
    if found.streams:
        peak_per_us = memory.bandwidth_gb_per_s * 1e3
        rates = [sample.amount / sample.time_us for sample in found.streams]
        memory = replace(memory, efficiency=min(1.0, median(rates) / peak_per_us))
        sources["memory.efficiency"] = f"measured: {', '.join(sample.what for sample in found.streams)}"
    if found.capacity_bytes is not None:
        memory = replace(memory, capacity_gb=found.capacity_bytes / 1e9)
        sources["memory.capacity_gb"] = "measured"
    gpus = found.gpus_per_node or base.node.gpus
    return replace(base, memory=memory, node=replace(base.node, gpus=gpus)), sources


def _links(found: Measurements, base: Hardware) -> _Step:
    inside = [sample for sample in found.collectives if sample.ranks <= sample.ranks_per_node]
    across = [sample for sample in found.collectives if sample.ranks > sample.ranks_per_node]
    intra, inter, sources = base.intra_node, base.inter_node, {}
    if inside:
        intra = _with_all_to_all(fit_link(_decisive(inside), intra), inside)
        sources["intra_node"] = f"measured: {_described(inside)}"
    if across:
        inter = fit_link(_as_one_node(_decisive(across), intra), inter)
        sources["inter_node"] = f"measured: {_described(across)}"
    return replace(base, intra_node=intra, inter_node=inter), sources


def _with_all_to_all(link: Link, samples: Sequence[CollectiveSample]) -> Link:
    """Each rank sends to each other by itself there, so an all-to-all may have another rate than a ring."""
    rates = [
        crossing_bytes(sample.collective)
        / 1e3
        / max(sample.time_us - link.latency_us - link.hop_us * sample.hops, 1e-3)
        for sample in samples
        if sample.kind is CollectiveKind.ALL_TO_ALL and sample.payload_bytes >= _LARGE_BYTES
    ]
    return replace(link, all_to_all_gb_per_s=median(rates) if rates else None)


def _decisive(samples: Sequence[CollectiveSample]) -> list[CollectiveSample]:
    return [sample for sample in samples if sample.kind in _FITTED] or list(samples)


def _described(samples: Sequence[CollectiveSample]) -> str:
    used = _decisive(samples)
    kinds = ", ".join(sorted({sample.kind.value for sample in used}))
    ranks = ", ".join(map(str, sorted({sample.ranks for sample in used})))
    return f"{kinds} of {ranks} ranks"


def _as_one_node(samples: Sequence[CollectiveSample], intra: Link) -> list[CollectiveSample]:
    """Rings over nodes as rings over adapters: what one rank's adapter carries, of what is not limited inside a node.

    A ring enters a node through the adapters of all its members there. One that is as slow as the link inside says
    nothing of the adapters and is dropped.
    """
    found = []
    for sample in samples:
        inside_us = crossing_bytes(sample.collective) / (intra.bandwidth_gb_per_s * 1e3)
        if inside_us < 0.8 * sample.time_us or sample.ranks_per_node == 1:
            found.append(replace(sample, payload_bytes=sample.payload_bytes // sample.ranks_per_node))
    return found


def _contentions(found: Measurements, base: Hardware) -> _Step:
    if not found.contention:
        return base, {}
    factors = found.contention.values()
    general = replace(
        base.contention,
        compute_beside_communication=fmean(one.compute_beside_communication for one in factors),
        communication_beside_compute=fmean(one.communication_beside_compute for one in factors),
    )
    by_kind = {
        kind: replace(general, compute_beside_communication=one.compute_beside_communication,
                      communication_beside_compute=one.communication_beside_compute)
        for kind, one in found.contention.items()
    }  # fmt: skip
    sources = {
        "contention": "measured beside a bf16 GEMM",
        **{f"contention.{kind.value}": "measured" for kind in by_kind},
    }
    return replace(base, contention=general, contention_by_kind=by_kind), sources


def _points(found: Measurements, hardware: Hardware) -> Iterator[Point]:
    compute = hardware.compute
    for samples, efficiency in (
        (found.gemms, compute.matmul_efficiency),
        (found.attention, compute.attention_efficiency),
    ):
        for sample in samples:
            rate_per_us = hardware.peak_flops_per_us("bfloat16") * efficiency
            yield Point(sample.what, sample.time_us, compute.matmul_ramp_us + sample.amount / rate_per_us)
    for sample in found.streams:
        yield Point(sample.what, sample.time_us, compute.kernel_us + hardware.traffic_us(sample.amount))
    for one in found.collectives:
        what = f"{one.kind.value} of {one.payload_bytes / 2**20:g} MiB, {one.ranks} ranks"
        yield Point(what, one.time_us, collective_us(one.collective, hardware, one.ranks_per_node))
