"""A calibration for the terminal: every measured time beside the model's, and what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from overlap_pass.cost.calibration import Calibration
from overlap_pass.report.console import printed
from overlap_pass.units import format_us

__all__ = ["render"]


def render(found: Calibration, *, width: int = 100) -> str:
    """Text ending in a newline."""
    return printed(_parts(found), width=width)


def _parts(found: Calibration) -> Iterator[RenderableType]:
    yield Text(found.hardware.name, style="bold")
    if found.points:
        yield _points(found)
    yield from map(Text, _summary(found))


def _points(found: Calibration) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("measured", no_wrap=True)
    for heading in ("time", "model", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in found.points:
        table.add_row(
            Text(point.what), format_us(point.measured_us), format_us(point.model_us), f"{point.error_percent:+.0f} %"
        )
    return table


def _summary(found: Calibration) -> list[str]:
    hardware, compute, link = found.hardware, found.hardware.compute, found.hardware.intra_node
    peak = compute.peak_tflops.get("bfloat16", compute.peak_tflops["float32"])
    beside = hardware.contention
    lines = [
        f"matrix products {compute.matmul_efficiency * peak:.3g} TFLOP/s, attention "
        f"{compute.attention_efficiency * peak:.3g}, memory {hardware.memory.efficiency * hardware.memory.bandwidth_gb_per_s:.0f} GB/s",
        f"link {link.bandwidth_gb_per_s:.3g} GB/s, {link.latency_us:.1f} µs; launches {compute.kernel_launch_us:.1f} µs a "
        f"kernel, {compute.collective_launch_us:.0f} µs a collective",
        f"side by side a GEMM takes ×{beside.compute_beside_communication:.2f}, a collective "
        f"×{beside.communication_beside_compute:.2f}",
    ]
    if hardware.copy_engine is not None:
        lines.append(f"copy engine {hardware.copy_engine.bandwidth_gb_per_s:.3g} GB/s")
    if found.points:
        lines.append(f"median error of the model {median(abs(point.error_percent) for point in found.points):.1f} %")
    return [*lines, *(f"not measured: {reason}" for reason in found.left_out)]
