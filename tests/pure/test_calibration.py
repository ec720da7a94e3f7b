"""From measured times to a hardware file, with times that a known machine would give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_pass.cost.calibration import Measurements, calibrated
from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.contention import Contention
from overlap_pass.cost.fit import CollectiveSample, KernelSample
from overlap_pass.cost.hardware import Hardware, Link, load_hardware
from overlap_pass.cost.write import to_toml
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.report import calibration_text

H100, H200 = load_hardware("h100"), load_hardware("h200")
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


def _collectives(machine: Hardware, ranks: int, per_node: int) -> tuple[CollectiveSample, ...]:
    found = []
    for kind in (GATHER, SCATTER, CollectiveKind.ALL_TO_ALL):
        for exponent in range(16, 31, 2):
            sample = CollectiveSample(kind, 2**exponent, ranks, per_node, 0.0)
            found.append(replace(sample, time_us=collective_us(sample.collective, machine, per_node)))
    return tuple(found)


def _measured(machine: Hardware) -> Measurements:
    """What a machine would show, were it exactly as its file says."""
    compute, peak = machine.compute, machine.peak_flops_per_us("bfloat16")

    def kernel(efficiency: float, flops: float) -> KernelSample:
        return KernelSample("kernel", flops, compute.matmul_ramp_us + flops / (peak * efficiency))

    return Measurements(
        collectives=_collectives(machine, 2, 2),
        gemms=tuple(kernel(compute.matmul_efficiency, flops) for flops in (3e10, 1e11, 5e11)),
        attention=(kernel(compute.attention_efficiency, 1e11),),
        streams=(KernelSample("copy", 1e9, machine.traffic_us(1e9)),),
        least_kernel_us=compute.kernel_us,
        kernel_launch_us=compute.kernel_launch_us,
        collective_launch_us=compute.collective_launch_us,
        contention=dict(machine.contention_by_kind),
        capacity_bytes=machine.capacity_bytes,
    )


def test_a_machine_that_is_as_its_file_says_gives_that_file_back() -> None:
    """Measured on an H200 with the H100 file as base: datasheet figures are the base's, all else is the H200's."""
    found = calibrated(_measured(H200), replace(H100, compute=replace(H100.compute, peak_tflops=H200.compute.peak_tflops),
                                                memory=H200.memory), "mine")  # fmt: skip
    assert found.hardware.name == "mine"
    for key in ("matmul_efficiency", "attention_efficiency", "matmul_ramp_us", "kernel_us", "collective_launch_us"):
        assert getattr(found.hardware.compute, key) == pytest.approx(getattr(H200.compute, key), rel=1e-3), key
    assert found.hardware.memory.efficiency == pytest.approx(H200.memory.efficiency)
    assert found.hardware.intra_node.bandwidth_gb_per_s == pytest.approx(262.0, rel=0.02)
    assert found.hardware.contention_by_kind[GATHER] == H200.contention_by_kind[GATHER]
    assert max(abs(point.error_percent) for point in found.points) < 5


def test_a_link_whose_all_to_alls_have_a_rate_of_their_own_gives_that_rate_back() -> None:
    host = load_hardware("h200-host-staged")
    assert host.intra_node.all_to_all_gb_per_s == 21.0 != host.intra_node.bandwidth_gb_per_s
    found = calibrated(replace(_measured(H200), collectives=_collectives(host, 2, 2)), H200, "mine").hardware.intra_node
    assert found.all_to_all_gb_per_s == pytest.approx(21.0, rel=0.02)
    assert found.bandwidth_gb_per_s == pytest.approx(host.intra_node.bandwidth_gb_per_s, rel=0.02)


def test_contention_that_was_measured_at_the_power_limit_goes_with_the_speed_there() -> None:
    assert H200.compute.rested_speedup is not None
    assert calibrated(_measured(H200), H200, "mine").hardware.compute.rested_speedup is None
    without = calibrated(replace(_measured(H200), contention={}), H200, "mine").hardware
    assert without.compute.rested_speedup == H200.compute.rested_speedup, "as the base's contention"


def test_what_was_not_measured_stays_as_in_the_base_and_says_so() -> None:
    found = calibrated(Measurements(left_out=("copy engine: no",)), H200, "mine")
    assert found.hardware == replace(H200, name="mine")
    assert set(found.sources.values()) == {"as h200"}
    assert found.left_out == ("copy engine: no",)
    text = to_toml(found.hardware, sources=found.sources)
    assert "matmul_efficiency = 0.7  # as h200" in text
    assert "[intra_node]  # as h200" in text


def test_where_gpus_cannot_copy_from_each_other_the_bases_copy_engine_is_dropped() -> None:
    assert H200.copy_engine is not None
    assert calibrated(Measurements(copies=False), H200, "mine").hardware.copy_engine is None
    assert calibrated(Measurements(), H200, "mine").hardware.copy_engine == H200.copy_engine


def test_groups_over_nodes_give_the_link_between_nodes() -> None:
    """16 ranks on 4 nodes of 4: rings are limited by the adapters, which the members of a node share."""
    slow = replace(H200, inter_node=Link(bandwidth_gb_per_s=12.0, latency_us=30.0, hop_us=4.0, saturation_mb=0.0),
                   node=replace(H200.node, gpus=4))  # fmt: skip
    measured = Measurements(collectives=(*_collectives(slow, 4, 4), *_collectives(slow, 16, 4)))
    found = calibrated(measured, H200, "cluster").hardware
    assert found.inter_node.bandwidth_gb_per_s == pytest.approx(12.0, rel=0.05)
    assert found.intra_node.bandwidth_gb_per_s == pytest.approx(262.0, rel=0.05)


def test_factors_in_general_are_the_mean_of_the_kinds() -> None:
    factors = {GATHER: Contention(1.2, 1.6), SCATTER: Contention(1.4, 1.2)}
    found = calibrated(Measurements(contention=factors), H200, "mine").hardware
    assert found.contention.compute_beside_communication == pytest.approx(1.3)
    assert found.contention.communication_beside_compute == pytest.approx(1.4)
    assert found.contention_by_kind[SCATTER].compute_beside_communication == 1.4


def test_the_text_shows_each_point_beside_the_model_and_what_is_missing() -> None:
    measured = replace(_measured(H200), left_out=("copy engine: copies between GPUs need CUDA devices",))
    text = calibration_text.render(calibrated(measured, H200, "mine"))
    assert "all_gather of 1024 MiB, 2 ranks" in text
    assert "not measured: copy engine: copies between GPUs need CUDA devices" in text
    assert "median error of the model" in text
