"""What a machine can do, read from a TOML file: one file a GPU, in ``data/`` or wherever the user keeps one.

The file has a table for each class below and a key for each of its fields, spelled alike; every number's unit is in
its name. ``[contention.all_gather]`` and the like may override factors for one kind of collective. A file that lacks a
key, has one too many or a value out of range is refused with the key's name.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from overlap_pass.cost.contention import Contention
from overlap_pass.errors import HardwareError
from overlap_pass.graph.program import CollectiveKind

__all__ = ["Compute", "CopyEngine", "Hardware", "Link", "Memory", "Node", "hardware_names", "load_hardware"]


_NODE_US = 0.5
"""CPU time for each node of a recorded graph; measured on H200: 0.1 ms for a graph of 8 gathers, some 100 nodes, at most 1."""


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
        rested_speedup: so many times as fast matmuls and attention run at most on a device that rests in between
            (``cost.rest``); ``None`` where that was not measured.
    """

    matmul_efficiency: float
    attention_efficiency: float
    kernel_us: float
    matmul_ramp_us: float
    kernel_launch_us: float
    collective_launch_us: float
    peak_tflops: Mapping[str, float]
    rested_speedup: float | None = None


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
        all_to_all_gb_per_s: rate of a large all-to-all, where it is not that of a ring.
    """

    bandwidth_gb_per_s: float
    latency_us: float
    hop_us: float
    saturation_mb: float
    all_to_all_gb_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class CopyEngine:
    """Copies between the memories of GPUs in one box, which take no multiprocessor.

    Attributes:
        bandwidth_gb_per_s: rate of a large copy from or to one peer, in 10**9 bytes a second.
        latency_us: time of an empty copy, with the words by which the ranks tell each other how far they are.
        launch_us: CPU time to gather or reduce one tensor, its wait included.
        handshake_us: time that compute loses, for each launch, between the kernel before and its own kernel, to what it waits for.
        compute_beside_communication, communication_beside_compute: slow-downs, as in ``[contention]``.
    """

    bandwidth_gb_per_s: float
    latency_us: float
    launch_us: float
    handshake_us: float
    compute_beside_communication: float
    communication_beside_compute: float

    @property
    def contention(self) -> Contention:
        return Contention(self.compute_beside_communication, self.communication_beside_compute)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU, its node and its network.

    Attributes:
        inter_node: each GPU's share of the node's network.
        contention: slow-downs in general.
        contention_by_kind: slow-downs of the kinds of collectives that were measured on their own.
        copy_engine: copies among peers; ``None`` where the file has no ``[copy_engine]``: they are then priced as the
            communicator's collectives.
        recorded: the host launches recorded graphs, see :meth:`replaying`; no file says so.
    """

    name: str
    compute: Compute
    memory: Memory
    node: Node
    intra_node: Link
    inter_node: Link
    contention: Contention
    contention_by_kind: Mapping[CollectiveKind, Contention] = field(default_factory=dict)
    copy_engine: CopyEngine | None = None
    recorded: bool = False

    @property
    def capacity_bytes(self) -> int:
        return int(self.memory.capacity_gb * 1e9)

    def peak_flops_per_us(self, dtype: str) -> float:
        """Dense peak for ``dtype``; what has no figure of its own runs at the rate of ``float32``, float8 kinds alike."""
        peaks = self.compute.peak_tflops
        key = "float8" if dtype.startswith("float8") else dtype
        return peaks.get(key, peaks["float32"]) * 1e6

    def contention_of(self, kind: CollectiveKind, *, direct: bool = False) -> Contention:
        """How a communicator's collective and compute slow each other down.

        Args:
            direct: each rank sends to every other by itself, which an all-to-all's kernels do.
        """
        own = self.contention_by_kind.get(kind, self.contention)
        return self.contention_by_kind.get(CollectiveKind.ALL_TO_ALL, own) if direct else own

    def replaying(self) -> Hardware:
        """The same machine where the host launches recorded graphs: what is in them costs it next to nothing."""
        compute = replace(self.compute, kernel_launch_us=_NODE_US, collective_launch_us=_NODE_US)
        copies = self.copy_engine and replace(self.copy_engine, launch_us=_NODE_US)
        return replace(self, compute=compute, copy_engine=copies, recorded=True)

    def traffic_us(self, moved_bytes: float) -> float:
        """Time to read and write so many bytes of device memory."""
        return moved_bytes / (self.memory.bandwidth_gb_per_s * 1e3 * self.memory.efficiency)


def hardware_names() -> tuple[str, ...]:
    """Names that come with the package, sorted."""
    names = (entry.name for entry in _data().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_hardware(spec: str | Path) -> Hardware:
    """Load a machine by name (``"h100"``, any case) or from the user's own TOML file.

    Raises:
        HardwareError: no such name or file, or the file is incomplete; the message names the file and the key.

    >>> load_hardware("H200").node.gpus
    8
    """
    text = str(spec).strip()
    if text.lower() in hardware_names():
        name = f"{text.lower()}.toml"
        return _Reader(name).read((_data() / name).read_text("utf-8"))
    path = Path(text)
    if path.suffix != ".toml" and len(path.parts) <= 1:
        known = ", ".join(hardware_names())
        raise HardwareError(f"hardware={text!r} is not known: name one of {known}, or give the path of a .toml file")
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(f"hardware file {text!r} cannot be read: {error}") from error
    return _Reader(text).read(content)


def _data() -> Traversable:
    return files("overlap_pass.cost") / "data"


_MAY_BE_ZERO = {"kernel_us", "matmul_ramp_us", "kernel_launch_us", "collective_launch_us", "latency_us", "hop_us",
                "saturation_mb", "launch_us"}  # fmt: skip
_Table = TypeVar("_Table", Compute, CopyEngine, Memory, Node, Link, Contention)


class _Reader:
    """One file's content made into ``Hardware``; every complaint names the file and the key."""

    def __init__(self, file: str) -> None:
        self._file = file

    def read(self, content: str) -> Hardware:
        try:
            root = tomllib.loads(content)
        except tomllib.TOMLDecodeError as error:
            raise self._refusal(f"is no TOML: {error}") from error
        tables = ["name", "compute", "memory", "node", "intra_node", "inter_node", "contention", "copy_engine"]
        self._check_keys(root, tables, "", optional=["copy_engine"])
        if not isinstance(root["name"], str) or not root["name"]:
            raise self._refusal(f"has the key 'name' with {root['name']!r}, which is no name")
        general, by_kind = self._contentions(self._subtable(root, "contention"))
        return Hardware(
            name=root["name"],
            compute=self._table(Compute, self._subtable(root, "compute"), "compute."),
            memory=self._table(Memory, self._subtable(root, "memory"), "memory."),
            node=self._table(Node, self._subtable(root, "node"), "node."),
            intra_node=self._table(Link, self._subtable(root, "intra_node"), "intra_node."),
            inter_node=self._table(Link, self._subtable(root, "inter_node"), "inter_node."),
            contention=general,
            contention_by_kind=by_kind,
            copy_engine=(
                self._table(CopyEngine, self._subtable(root, "copy_engine"), "copy_engine.")
                if "copy_engine" in root
                else None
            ),
        )

    def _contentions(self, table: Mapping[str, Any]) -> tuple[Contention, dict[CollectiveKind, Contention]]:
        """The factors in general, and those of the kinds that have a table of their own (which inherits)."""
        kinds = [kind for kind in CollectiveKind if kind.value in table]
        shared = {key: value for key, value in table.items() if key not in kinds}
        general = self._table(Contention, shared, "contention.")
        own = {kind: {**shared, **self._subtable(table, kind.value)} for kind in kinds}
        return general, {kind: self._table(Contention, own[kind], f"contention.{kind}.") for kind in kinds}

    def _table(self, cls: type[_Table], table: Mapping[str, Any], prefix: str) -> _Table:
        optional = [field.name for field in fields(cls) if field.default is None]
        self._check_keys(table, [field.name for field in fields(cls)], prefix, optional)
        return cls(**{key: self._value(key, value, prefix) for key, value in table.items()})

    def _value(self, key: str, value: Any, prefix: str) -> Any:
        if key != "peak_tflops":
            return self._number(key, value, prefix)
        peaks = self._subtable({key: value}, key)
        if "float32" not in peaks:
            raise self._refusal(f"lacks the key '{prefix}{key}.float32'")
        return {dtype: self._number(dtype, peak, f"{prefix}{key}.") for dtype, peak in peaks.items()}

    def _subtable(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = table[key]
        if isinstance(found, Mapping):
            return found
        raise self._refusal(f"has the key {key!r} with {found!r}, which is no table")

    def _check_keys(
        self, table: Mapping[str, Any], expected: list[str], prefix: str, optional: Collection[str] = ()
    ) -> None:
        for key in expected:
            if key not in table and key not in optional:
                raise self._refusal(f"lacks the key {prefix + key!r}")
        for key in table:
            if key not in expected:
                raise self._refusal(f"has the unknown key {prefix + key!r}; known: {', '.join(expected)}")

    def _number(self, key: str, value: Any, prefix: str) -> float:
        where = f"has the key {prefix + key!r} with {value!r}"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._refusal(f"{where}, which is no number")
        if "_beside_" in key and value < 1:
            raise self._refusal(f"{where}: a slow-down must be at least 1")
        if key.endswith("speedup") and value < 1:
            raise self._refusal(f"{where}: a speed-up must be at least 1")
        if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
            raise self._refusal(f"{where}: it must be above 0")
        if key.endswith("efficiency") and value > 1:
            raise self._refusal(f"{where}: a share of the peak cannot be above 1")
        if key == "gpus" and value != int(value):
            raise self._refusal(f"{where}: it must be a whole number")
        return value

    def _refusal(self, complaint: str) -> HardwareError:
        return HardwareError(f"hardware file {self._file!r} {complaint}")
