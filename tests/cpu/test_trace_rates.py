"""Hardware files fitted to profiler traces: made ones with known rates, and real ones where they lie beside the checkout."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.cli.main import main
from overlap_pass.cost.calibration import calibrated
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import TraceError
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.profiling.trace_rates import trace_rates

SHARED = Path(__file__).parents[2].parent / "shared" / "traces"
GATHER_GB_PER_S, GATHER_LATENCY_US = 200.0, 12.0
TFLOPS, RAMP_US = 600.0, 6.0


def _gather(elements: int, late_us: float = 0.0) -> dict[str, Any]:
    """An all-gather of two ranks in bf16; its kernel runs longer where a peer is late."""
    crossing_bytes = elements * 2 / 2
    return {
        "ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "ts": 0, "pid": 0, "tid": 20,
        "dur": GATHER_LATENCY_US + crossing_bytes / GATHER_GB_PER_S / 1e3 + late_us,
        "args": {"Collective name": "_allgather_base", "In msg nelems": elements // 2, "Out msg nelems": elements,
                 "dtype": "BFloat16", "Group size": 2},
    }  # fmt: skip


def _product(number: int, rows: int, inner: int, columns: int) -> list[dict[str, Any]]:
    """``aten::mm`` with its shapes, and the kernel it launched."""
    flops = 2.0 * rows * inner * columns
    return [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5, "pid": 1, "tid": 1,
         "args": {"External id": number, "Input Dims": [[rows, inner], [inner, columns]],
                  "Input type": ["c10::BFloat16", "c10::BFloat16"]}},
        {"ph": "X", "cat": "kernel", "name": "nvjet_sm90", "ts": 0, "pid": 0, "tid": 7,
         "dur": RAMP_US + flops / (TFLOPS * 1e6), "args": {"External id": number}},
    ]  # fmt: skip


def _launches(gap_us: float) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 100 + gap_us * number, "dur": 2, "pid": 1,
         "tid": 1}
        for number in range(40)
    ]  # fmt: skip


def _write(path: Path, events: list[dict[str, Any]]) -> Path:
    document = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


@pytest.fixture
def trace(tmp_path) -> Path:
    gathers = [_gather(2**exponent, late_us=late) for exponent in (20, 24, 28) for late in (400.0, 0.0, 90.0)]
    products = [
        *_product(1, 1024, 4096, 4096), *_product(2, 4096, 4096, 14336), *_product(3, 8192, 8192, 8192),
    ]  # fmt: skip
    return _write(tmp_path / "rank-0.json.gz", [*gathers, *products, *_launches(7.5)])


def test_rates_of_a_made_trace_are_found_again(trace) -> None:
    found = trace_rates([trace], gpus_per_node=8)
    assert found.device_name == "NVIDIA H200"
    hardware = calibrated(found.measurements, load_hardware("h200"), "traced").hardware
    assert hardware.intra_node.bandwidth_gb_per_s == pytest.approx(GATHER_GB_PER_S, rel=1e-3)
    assert hardware.intra_node.latency_us + hardware.intra_node.hop_us == pytest.approx(GATHER_LATENCY_US, rel=1e-3)
    assert hardware.compute.matmul_efficiency * 989.4 == pytest.approx(TFLOPS, rel=1e-3)
    assert hardware.compute.matmul_ramp_us == pytest.approx(RAMP_US, rel=1e-2)
    assert hardware.compute.kernel_launch_us == pytest.approx(7.5)


def test_of_several_ranks_the_one_that_waited_least_counts(trace, tmp_path) -> None:
    """A rank that comes last has the shortest kernels: those hold the transfer alone."""
    waited = _write(tmp_path / "rank-1.json.gz", [_gather(2**exponent, late_us=900.0) for exponent in (20, 24, 28)])
    both = trace_rates([waited, trace], gpus_per_node=8).measurements
    assert both.collectives == trace_rates([trace], gpus_per_node=8).measurements.collectives


def test_what_a_trace_does_not_hold_is_named(tmp_path) -> None:
    found = trace_rates([_write(tmp_path / "few.json.gz", [_gather(2**20)])], gpus_per_node=8).measurements
    assert found.collectives == ()
    assert [reason.partition(":")[0] for reason in found.left_out[:3]] == ["links", "matrix products", "launches"]


def test_a_file_that_is_no_trace_is_refused(tmp_path) -> None:
    file = tmp_path / "no.json"
    file.write_text("[]")
    with pytest.raises(TraceError, match="holds no traceEvents"):
        trace_rates([file], gpus_per_node=8)
    with pytest.raises(TraceError, match="cannot be read"):
        trace_rates([tmp_path / "absent.json"], gpus_per_node=8)


def test_the_command_writes_a_file_that_loads(trace, tmp_path, capsys) -> None:
    output = tmp_path / "mine.toml"
    assert main(["calibrate", "--from-trace", str(trace), "--output", str(output)]) == 0
    assert load_hardware(output).name == "NVIDIA H200"
    assert "fitted to traces" in output.read_text()
    assert "GEMM 8192 × 8192 × 8192" in capsys.readouterr().out


@pytest.mark.skipif(not SHARED.is_dir(), reason="no recorded traces beside the checkout")
def test_all_reduces_of_a_real_run_are_priced_within_a_quarter() -> None:
    """Two A100 of a DDP run: of each size the kernel that waited least; the median of the errors."""
    found = trace_rates([SHARED / "hta-a100x2-ncclargs" / "rank-0.json.gz"], gpus_per_node=8)
    assert found.device_name is not None
    assert "A100" in found.device_name
    kinds = {sample.kind for sample in found.measurements.collectives}
    assert kinds == {CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST}
    fitted = calibrated(found.measurements, load_hardware("a100"), "traced")
    errors = sorted(abs(point.error_percent) for point in fitted.points)
    assert errors[len(errors) // 2] < 25
