"""What a machine can do, read from a TOML file: one file a GPU, in ``data/`` or wherever the user keeps one.

The file has a table for each class below and a key for each of its fields, spelled alike; every number's unit is in
its name. A file that lacks a key, has one too many or a value out of range is refused with the key's name.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from overlap_pass.cost.contention import Contention
from overlap_pass.errors import HardwareError

__all__ = ["Compute", "Hardware", "Link", "Memory", "Node", "hardware_names", "load_hardware"]


@dataclass(frozen=True, slots=True)
class Compute:
    """The processor.

    Attributes:
        matmul_efficiency: share of the peak that a large matmul reaches, in (0, 1].
        attention_efficiency: share of the peak that fused attention reaches, in (0, 1].
        kernel_us: least time of a kernel on the device: its start and its drain.
        matmul_ramp_us: the same for a matmul, whose first and last waves leave most of the device empty.
        kernel_launch_us: CPU time to launch one kernel.
        collective_launch_us: CPU time to launch one collective and its wait.
        peak_tflops: dtype → dense peak in 10**12 FLOP/s; ``float32`` is required.
    """

    matmul_efficiency: float
    attention_efficiency: float
    kernel_us: float
    matmul_ramp_us: float
    kernel_launch_us: float
    collective_launch_us: float
    peak_tflops: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Memory:
    """The device memory; ``efficiency`` is the share of the bandwidth that a streaming kernel reaches, in (0, 1]."""

    capacity_gb: float
    bandwidth_gb_per_s: float
    efficiency: float


@dataclass(frozen=True, slots=True)
class Node:
    """What stands in one box: ``gpus`` with the fast link between them."""

    gpus: int


@dataclass(frozen=True, slots=True)
class Link:
    """A link as a collective sees it, for each GPU and direction.

    Attributes:
        bandwidth_gb_per_s: rate of a large collective, in 10**9 bytes a second.
        latency_us: time of an empty collective of two ranks, but for its hop.
        hop_us: more time for each further rank of the ring.
        saturation_mb: a collective that moves less than this across the link takes as long as one that moves this.
    """

    bandwidth_gb_per_s: float
    latency_us: float
    hop_us: float
    saturation_mb: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its node and its network. ``inter_node`` is each GPU's share of the node's network."""

    name: str
    compute: Compute
    memory: Memory
    node: Node
    intra_node: Link
    inter_node: Link
    contention: Contention

    @property
    def capacity_bytes(self) -> int:
        return int(self.memory.capacity_gb * 1e9)

    def peak_flops_per_us(self, dtype: str) -> float:
        """Dense peak for ``dtype``; what has no figure of its own runs at the rate of ``float32``, float8 kinds alike."""
        peaks = self.compute.peak_tflops
        key = "float8" if dtype.startswith("float8") else dtype
        return peaks.get(key, peaks["float32"]) * 1e6

    def traffic_us(self, moved_bytes: float) -> float:
        """Time to read and write so many bytes of device memory."""
        return moved_bytes / (self.memory.bandwidth_gb_per_s * 1e3 * self.memory.efficiency)


def hardware_names() -> tuple[str, ...]:
    """Names that come with the package, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in _data().iterdir() if entry.name.endswith(".toml"))
    )


def load_hardware(spec: str | Path) -> Hardware:
    """Load a machine by name (``"h100"``, any case) or from the user's own TOML file.

    Raises:
        HardwareError: no such name or file, or the file is incomplete; the message names the file and the key.

    >>> load_hardware("H200").node.gpus
    8
    """
    text = str(spec).strip()
    if text.lower() in hardware_names():
        return _parse((_data() / f"{text.lower()}.toml").read_text("utf-8"), f"{text.lower()}.toml")
    path = Path(text)
    if path.suffix != ".toml" and len(path.parts) == 1:
        known = ", ".join(hardware_names())
        raise HardwareError(f"hardware={text!r} is not known: name one of {known}, or give the path of a .toml file")
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(f"hardware file {text!r} cannot be read: {error}") from error
    return _parse(content, text)


def _data() -> Traversable:
    return files("overlap_pass.cost") / "data"


def _parse(content: str, file: str) -> Hardware:
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"hardware file {file!r} is no TOML: {error}") from error
    hardware = Hardware(**_fields(Hardware, table, file, ""))
    if "float32" not in hardware.compute.peak_tflops:
        raise HardwareError(f"hardware file {file!r} lacks the key 'compute.peak_tflops.float32'")
    return hardware


_TABLES = {"compute": Compute, "memory": Memory, "node": Node, "intra_node": Link, "inter_node": Link,
           "contention": Contention}  # fmt: skip
_AT_MOST_ONE = ("efficiency", "matmul_efficiency", "attention_efficiency")
_MAY_BE_ZERO = ("kernel_us", "matmul_ramp_us", "kernel_launch_us", "collective_launch_us", "latency_us", "hop_us",
                "saturation_mb")  # fmt: skip


def _fields(cls: type[Any], table: Mapping[str, Any], file: str, prefix: str) -> dict[str, Any]:
    names = [field.name for field in fields(cls)]
    for name in names:
        if name not in table:
            raise HardwareError(f"hardware file {file!r} lacks the key {prefix + name!r}")
    for name in table:
        if name not in names:
            raise HardwareError(
                f"hardware file {file!r} has the unknown key {prefix + name!r}; known: {', '.join(names)}"
            )
    return {name: _value(name, table[name], file, prefix) for name in names}


def _value(name: str, value: Any, file: str, prefix: str) -> Any:
    where = f"hardware file {file!r}, key {prefix + name!r}"
    if name == "name":
        if isinstance(value, str) and value:
            return value
        raise HardwareError(f"{where}: {value!r} is no name")
    if name in _TABLES or name == "peak_tflops":
        if not isinstance(value, Mapping):
            raise HardwareError(f"{where}: {value!r} is no table")
        inner = f"{prefix}{name}."
        if name == "peak_tflops":
            return {
                key: _number(key, peak, f"hardware file {file!r}, key {inner + key!r}") for key, peak in value.items()
            }
        return _TABLES[name](**_fields(_TABLES[name], value, file, inner))
    return _number(name, value, where)


def _number(name: str, value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise HardwareError(f"{where}: {value!r} is no number")
    low = 1 if name.startswith(("compute_beside", "communication_beside")) else 0
    if value < low or (value == 0 and name not in _MAY_BE_ZERO):
        raise HardwareError(f"{where}: {value!r} is too small, it must be {'at least 1' if low else 'above 0'}")
    if name in _AT_MOST_ONE and value > 1:
        raise HardwareError(f"{where}: {value!r} is a share of the peak and cannot be above 1")
    if name == "gpus" and value != int(value):
        raise HardwareError(f"{where}: {value!r} is no whole number of GPUs")
    return value
