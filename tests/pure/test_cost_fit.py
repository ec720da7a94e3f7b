"""Numbers fitted from times that are known to follow from given numbers, and files that read back equal."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap_pass.cost.collectives import collective_us
from overlap_pass.cost.fit import CollectiveSample, KernelSample, fit_efficiency, fit_link, relative_error
from overlap_pass.cost.hardware import Hardware, Link, hardware_names, load_hardware
from overlap_pass.cost.write import to_toml
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import CollectiveKind

H200 = load_hardware("h200")
KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
SIZES = [2**exponent for exponent in range(16, 31, 2)]


def _samples(hardware: Hardware, ranks: tuple[int, ...] = (2,), noise: float = 0.0) -> list[CollectiveSample]:
    draws = random.Random(1)
    found = []
    for kind in KINDS:
        for count in ranks:
            for size in SIZES:
                sample = CollectiveSample(kind, size, count, count, 0.0)
                time_us = collective_us(sample.collective, hardware) * (1 + draws.uniform(-noise, noise))
                found.append(replace(sample, time_us=time_us))
    return found


links = st.builds(
    Link,
    bandwidth_gb_per_s=st.floats(10, 900),
    latency_us=st.floats(1, 60),
    hop_us=st.floats(0.1, 5),
    saturation_mb=st.just(0.0),
)


@settings(max_examples=40, deadline=None)
@given(links)
def test_a_link_is_found_again_from_the_times_it_gives(link: Link) -> None:
    hardware = replace(H200, intra_node=link)
    found = fit_link(_samples(hardware, (2, 4, 8)), H200.intra_node)
    assert found.bandwidth_gb_per_s == pytest.approx(link.bandwidth_gb_per_s, rel=1e-3)
    assert found.latency_us == pytest.approx(link.latency_us, rel=1e-3, abs=1e-3)
    assert found.hop_us == pytest.approx(link.hop_us, rel=1e-3, abs=1e-3)


def test_a_flat_start_is_found_as_saturation() -> None:
    link = Link(bandwidth_gb_per_s=262.0, latency_us=8.0, hop_us=1.9, saturation_mb=4.0)
    samples = _samples(replace(H200, intra_node=link))
    found = fit_link(samples, link)
    hardware = replace(H200, intra_node=found)
    assert found.bandwidth_gb_per_s == pytest.approx(262.0, rel=0.02)
    assert relative_error((collective_us(one.collective, hardware), one.time_us) for one in samples) < 0.02
    assert 1.0 < found.saturation_mb < 10.0


def test_with_groups_of_one_size_the_hop_stays_what_it_was() -> None:
    found = fit_link(_samples(H200), replace(H200.intra_node, hop_us=0.7))
    assert found.hop_us == 0.7


def test_noise_of_five_percent_moves_the_bandwidth_by_less() -> None:
    found = fit_link(_samples(H200, noise=0.05), H200.intra_node)
    assert found.bandwidth_gb_per_s == pytest.approx(H200.intra_node.bandwidth_gb_per_s, rel=0.05)


def test_times_that_tell_nothing_are_refused() -> None:
    flat = [replace(one, time_us=10.0) for one in _samples(H200)]
    with pytest.raises(PlanError, match="three sizes"):
        fit_link(flat[:2], H200.intra_node)
    shrinking = [CollectiveSample(CollectiveKind.ALL_GATHER, 2**n, 2, 2, 2.0**-n) for n in range(10, 20)]
    with pytest.raises(PlanError, match="take no longer the more they move"):
        fit_link(shrinking, H200.intra_node)


@given(st.floats(0.05, 1.0), st.floats(0.0, 20.0))
def test_an_efficiency_and_a_start_are_found_again(efficiency: float, start_us: float) -> None:
    peak_per_us = 989.4e6
    samples = [
        KernelSample(f"{flops:.0e}", flops, start_us + flops / (peak_per_us * efficiency))
        for flops in (1e9, 3e10, 5e11, 1e12)
    ]
    found, found_start_us = fit_efficiency(samples, peak_per_us)
    assert found == pytest.approx(efficiency, rel=1e-3)
    assert found_start_us == pytest.approx(start_us, rel=1e-2, abs=1e-2)


def test_nothing_is_faster_than_the_datasheet() -> None:
    samples = [KernelSample("gemm", amount, 2.0 + amount / 2e9) for amount in (1e9, 1e10, 1e11)]
    assert fit_efficiency(samples, 1e9)[0] == 1.0


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_machine_is_written_and_read_back_equal(name: str, tmp_path) -> None:
    hardware = load_hardware(name)
    file = tmp_path / "mine.toml"
    file.write_text(to_toml(hardware, heading="Two lines\nof comment", sources={"memory": "measured"}))
    assert load_hardware(file) == hardware
    assert file.read_text().startswith("# Two lines\n# of comment\nname = ")
    assert "[memory]  # measured" in file.read_text()
