"""Hardware files: what comes with the package, what a user's own file may say, what is refused and how."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from overlap_pass.cost.hardware import hardware_names, load_hardware
from overlap_pass.errors import HardwareError, OptionError
from overlap_pass.graph.program import CollectiveKind

_SHIPPED = files("overlap_pass.cost") / "data"


def test_the_three_machines_of_the_documentation_come_with_the_package() -> None:
    assert {"h100", "h200", "a100"} <= set(hardware_names())


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_file_loads_by_its_name_in_any_case(name: str) -> None:
    assert load_hardware(name.upper()).name == name
    assert load_hardware(f" {name} ") == load_hardware(name)


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_of_a_shipped_file_has_its_source_in_a_comment_or_its_table_does(name: str) -> None:
    """A line with a number either carries a comment or stands in a table whose header does."""
    header = ""
    for line in (_SHIPPED / f"{name}.toml").read_text("utf-8").splitlines():
        if line.startswith("["):
            header = line
        elif "=" in line and not line.startswith(("#", "name")):
            assert "#" in line or "#" in header, f"{name}.toml: {line}"


@pytest.mark.parametrize(
    ("name", "bf16_tflops", "memory_gb_per_s", "capacity_gb"),
    [("h100", 989.4, 3350, 80), ("h200", 989.4, 4800, 141), ("a100", 312, 2039, 80)],
)
def test_peaks_are_the_dense_ones_of_the_datasheets(
    name: str, bf16_tflops: float, memory_gb_per_s: float, capacity_gb: float
) -> None:
    hardware = load_hardware(name)
    assert hardware.compute.peak_tflops["bfloat16"] == pytest.approx(bf16_tflops)
    assert hardware.memory.bandwidth_gb_per_s == memory_gb_per_s
    assert hardware.capacity_bytes == capacity_gb * 10**9


def test_a_dtype_without_a_peak_of_its_own_runs_at_float32_and_all_float8_alike() -> None:
    hardware = load_hardware("h100")
    assert hardware.peak_flops_per_us("int64") == hardware.peak_flops_per_us("float32")
    assert hardware.peak_flops_per_us("float8_e4m3fn") == 1978.9e6
    assert load_hardware("a100").peak_flops_per_us("float8_e4m3fn") == 19.5e6


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HardwareError, match=r"hardware='h1000' is not known.*a100.*h100.*h200"):
        load_hardware("h1000")


def test_a_hardware_error_is_an_option_error() -> None:
    with pytest.raises(OptionError):
        load_hardware("")


def test_a_missing_file_is_refused_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"mine\.toml.*cannot be read"):
        load_hardware(tmp_path / "mine.toml")


def _own(tmp_path: Path, old: str = "", new: str = "") -> Path:
    """The shipped H100 file with one piece replaced."""
    content = (_SHIPPED / "h100.toml").read_text("utf-8")
    assert old in content
    path = tmp_path / "mine.toml"
    path.write_text(content.replace(old, new, 1), "utf-8")
    return path


def test_a_users_own_file_is_read_from_its_path(tmp_path: Path) -> None:
    hardware = load_hardware(_own(tmp_path, 'name = "h100"', 'name = "my cluster"'))
    assert hardware.name == "my cluster"
    assert hardware.node.gpus == 8


def _leaves(table: dict[str, object], prefix: str = "") -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, value in table.items():
        inner = _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}",)]
        found += inner
    return found


_REQUIRED = [
    leaf
    for (leaf,) in _leaves(tomllib.loads((_SHIPPED / "h100.toml").read_text("utf-8")))
    if not leaf.startswith(("contention.all_gather", "contention.reduce_scatter", "compute.peak_tflops"))
]


@pytest.mark.parametrize("leaf", [*_REQUIRED, "compute.peak_tflops.float32"])
def test_a_missing_key_is_refused_by_file_and_key(tmp_path: Path, leaf: str) -> None:
    table, key = leaf.rsplit(".", 1) if "." in leaf else ("", leaf)
    lines, inside = [], table == ""
    for line in (_SHIPPED / "h100.toml").read_text("utf-8").splitlines():
        if line.startswith("["):
            inside = line.split("]")[0] == f"[{table}"
        if not (inside and line.split("=")[0].strip() == key):
            lines.append(line)
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(lines), "utf-8")

    with pytest.raises(HardwareError, match=rf"mine\.toml.*lacks the key '{leaf}'"):
        load_hardware(path)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("gpus = 8", "gpus = 8\nracks = 2", "unknown key 'node.racks'; known: gpus"),
        ("gpus = 8", "gpus = 8.5", "'node.gpus' with 8.5: it must be a whole number"),
        ("gpus = 8", "gpus = true", "'node.gpus' with True, which is no number"),
        ("gpus = 8", "gpus = 0", "'node.gpus' with 0: it must be above 0"),
        ("matmul_efficiency = 0.76", "matmul_efficiency = 1.7", "'compute.matmul_efficiency' with 1.7: a share"),
        ("kernel_us = 2.0", "kernel_us = -2.0", "'compute.kernel_us' with -2.0: it must be above 0"),
        ("kernel_us = 2.0", "kernel_us = nan", "'compute.kernel_us' with nan, which is no number"),
        ("kernel_us = 2.0", 'kernel_us = "2us"', "'compute.kernel_us' with '2us', which is no number"),
        ("bfloat16 = 989.4", "bfloat16 = 0", "'compute.peak_tflops.bfloat16' with 0: it must be above 0"),
        ('name = "h100"', "name = 100", "'name' with 100, which is no name"),
        (
            "compute_beside_communication = 1.235",
            "compute_beside_communication = 0.9",
            "a slow-down must be at least 1",
        ),
        ("[contention.all_gather]", "[contention.gather]", "unknown key 'contention.gather'"),
        ('name = "h100"', "name = ", "is no TOML"),
        ("[node]", "[node", "is no TOML"),
        ("[memory]", "[[memory]]", "'memory' with .* which is no table"),
    ],
)
def test_a_value_out_of_range_is_refused_by_file_key_and_value(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    with pytest.raises(HardwareError, match=rf"mine\.toml.*{complaint}"):
        load_hardware(_own(tmp_path, old, new))


def test_a_kind_of_collective_may_have_factors_of_its_own_and_inherits_the_rest() -> None:
    hardware = load_hardware("h200")
    gather = hardware.contention_by_kind[CollectiveKind.ALL_GATHER]
    assert (gather.compute_beside_communication, gather.communication_beside_compute) == (1.23, 1.69)
    assert gather.communication_beside_communication == hardware.contention.communication_beside_communication
    assert CollectiveKind.ALL_REDUCE not in hardware.contention_by_kind


def test_a_file_without_factors_by_kind_is_complete(tmp_path: Path) -> None:
    content = (_SHIPPED / "h100.toml").read_text("utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(content[: content.index("[contention.all_gather]")], "utf-8")
    assert load_hardware(path).contention_by_kind == {}
