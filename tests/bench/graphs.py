"""Recorded graphs of real models, as programs with their recorded prices.

They lie in ``../shared/graphs`` beside the checkout, where somebody put them there, and are never part of it: forward and
backward graphs of Llama-3-8B and DeepSeek-v3 in neutral JSON, each with what torch's own pass made of it.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.graph.program import (
    Category,
    Collective,
    CollectiveKind,
    OpKind,
    OpNode,
    Phase,
    Program,
    Role,
    Storage,
)

__all__ = ["FOLDER", "Peer", "Recorded", "files", "read"]

FOLDER = Path(__file__).parents[3] / "shared" / "graphs"

_KINDS = {"placeholder": OpKind.INPUT, "compute": OpKind.COMPUTE, "view": OpKind.VIEW, "collective": OpKind.LAUNCH,
          "wait": OpKind.WAIT, "output": OpKind.OUTPUT}  # fmt: skip
_MATMULS = ("mm", "bmm", "addmm", "_grouped_mm")
_COPIES = ("cat", "clone", "copy_", "split_with_sizes_copy", "slice_scatter")
_POINTWISE = ("convert_element_type", "add", "sub", "mul", "div", "neg", "full", "_to_copy", "device_put")
_REDUCES = (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE)
_MOVES_DATA = (Category.NONE, Category.POINTWISE, Category.COPY)


_Curve = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Peer:
    """What torch's own pass made of a graph, in the recorder's simulator (a collective starts when its input exists).

    Attributes:
        step_us: with the collectives of the graph as they are.
        peak_ratio: its peak over that of the order as written, both in the recorder's count.
        frugal_us, frugal_peak_ratio: the same, allowed no memory above the order as written.
        bucketed_us, bucketed_peak_ratio, bucketed_planning_s: with its best buckets.
        planning_s: CPU seconds of its pass.
    """

    step_us: float
    peak_ratio: float
    frugal_us: float
    frugal_peak_ratio: float
    bucketed_us: float
    bucketed_peak_ratio: float
    bucketed_planning_s: float
    planning_s: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded graph.

    Attributes:
        costs: recorded durations, no contention, collectives free to start at any time: the recorder's rules.
        curves: (kind, communicator) → (bytes, microseconds), as recorded.
        over_payload: those of the curves whose bytes are of the whole tensor; of the others they are what a rank sends.
    """

    program: Program
    costs: CostTable
    peer: Peer
    curves: Mapping[tuple[CollectiveKind, str], _Curve]
    over_payload: frozenset[tuple[CollectiveKind, str]] = frozenset()

    def priced(self, program: Program) -> CostTable:
        """Prices of the program with some launches joined: a joined launch by the curve of its kind and communicator."""
        joined = {
            op.name: self._on_its_curve(op, op.collective)
            for op in program.launches
            if op.collective is not None and op.name not in self.costs.duration_us
        }
        known = {name: self.costs.duration_us.get(name, 0.0) for name in program.order}
        return replace(self.costs, duration_us={**known, **joined}, launch_us=dict.fromkeys(program.order, 0.0))

    def _on_its_curve(self, op: OpNode, collective: Collective) -> float:
        key = collective.kind, collective.group
        return _on_curve(self.curves[key], collective.payload_bytes if key in self.over_payload else op.read_bytes)


def files(folder: Path = FOLDER) -> tuple[Path, ...]:
    """Every recorded graph, by name; none where the folder is absent."""
    return tuple(sorted(folder.glob("*.json.gz")))


def read(path: Path) -> Recorded:
    """Read one graph. Roles of collectives are told from what they depend on and what depends on them."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    sizes = {name: group["size"] for name, group in data["process_groups"].items()}
    labels = {name: f"g{number}" for number, name in enumerate(_in_order_of_use(data["nodes"]))}
    ops = _all_waited(_waits_bound([_op(node, labels, sizes) for node in data["nodes"]]))
    program = Program(
        data["name"],
        Phase.BACKWARD if "_bw" in data["name"] else Phase.FORWARD,
        _with_roles(ops),
        _storages(data, ops),
        {label: sizes.get(name, 1) for name, label in labels.items()},
    )
    duration_us = {node["name"]: float(node["duration_us"]) for node in data["nodes"]}
    duration_us |= {name: 0.0 for name in program.order if name not in duration_us}
    costs = CostTable(duration_us, dict.fromkeys(program.order, 0.0), Contention(), hardware="recorded")
    curves = _curves(data["cost_curves"], labels)
    return Recorded(program, costs, _peer(data["reference"]), curves, _over_payload(program, duration_us, curves))


def _over_payload(
    program: Program, duration_us: Mapping[str, float], curves: Mapping[tuple[CollectiveKind, str], _Curve]
) -> frozenset[tuple[CollectiveKind, str]]:
    """Recorders do not agree on the bytes of a gather: those with which a curve gives the recorded times are its own."""
    errors: dict[tuple[CollectiveKind, str], list[float]] = {}
    for op in program.launches:
        if op.collective is None or (key := (op.collective.kind, op.collective.group)) not in curves:
            continue
        sizes, recorded_us = (op.read_bytes, op.collective.payload_bytes), duration_us[op.name]
        found = [abs(_on_curve(curves[key], size_bytes) - recorded_us) for size_bytes in sizes]
        errors[key] = [sum(both) for both in zip(errors.get(key, (0.0, 0.0)), found, strict=True)]
    return frozenset(key for key, (of_sent, of_payload) in errors.items() if of_payload < of_sent)


def _curves(recorded: Mapping[str, Any], labels: Mapping[str, str]) -> dict[tuple[CollectiveKind, str], _Curve]:
    found = {}
    for key, points in recorded.items():
        group, _, kind = key.partition(":")
        if group in labels:
            found[CollectiveKind(kind), labels[group]] = tuple(
                (float(size), float(time_us)) for size, time_us in points
            )
    return found


def _on_curve(curve: Sequence[tuple[float, float]], size_bytes: int) -> float:
    """Straight lines between the points, flat before the first."""
    at = min(max(bisect_left(curve, (size_bytes, 0.0)), 1), len(curve) - 1)
    (low, low_us), (high, high_us) = curve[at - 1], curve[at]
    share = max(0.0, (size_bytes - low) / (high - low))
    return low_us + share * (high_us - low_us)


def _in_order_of_use(nodes: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node["group"] for node in nodes if node["kind"] == "collective"))


def _op(node: Mapping[str, Any], labels: Mapping[str, str], sizes: Mapping[str, int]) -> OpNode:
    kind, inputs = _KINDS[node["kind"]], tuple(dict.fromkeys(node["inputs"]))
    name = node["op"].split(".")[1] if "." in node["op"] else node["op"]
    collective = None
    if kind is OpKind.LAUNCH:
        payload_bytes = max(node["bytes"], node["outputs_bytes"])
        collective = Collective(
            CollectiveKind(node["collective"]), labels[node["group"]], sizes.get(node["group"], 1), payload_bytes,
            "bfloat16", Role.ACTIVATION,
        )  # fmt: skip
    return OpNode(
        node["name"],
        kind,
        node["op"],
        inputs,
        tuple(node["storages"]),
        writes=tuple(node["storages"]) if name == "copy_" else (),
        category=_category(name) if kind is OpKind.COMPUTE else Category.NONE,
        read_bytes=node["bytes"],
        written_bytes=node["outputs_bytes"],
        collective=collective,
    )


def _category(name: str) -> Category:
    for names, category in (
        (_MATMULS, Category.MATMUL),
        (_COPIES, Category.COPY),
        (_POINTWISE, Category.POINTWISE),
    ):
        if name in names:
            return category
    return Category.OTHER


def _waits_bound(ops: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """Every wait with the name of its launch; one for a collective of another graph computes nothing."""
    launched: dict[str, str] = {}
    found = []
    for op in ops:
        source = next((launched[name] for name in op.inputs if name in launched), None)
        if op.kind is OpKind.WAIT:
            op = replace(op, launch=source) if source is not None else replace(op, kind=OpKind.VIEW)
        elif op.kind is OpKind.LAUNCH:
            launched[op.name] = op.name
        elif op.kind is OpKind.VIEW and source is not None:
            launched[op.name] = source
        found.append(op)
    return tuple(found)


def _all_waited(ops: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """A wait in front of the output for each collective whose result leaves unwaited, and sizes known without a wait.

    Both as the recorder's simulator has it: a step ends with its last collective, and a size costs nothing.
    """
    launches = {op.name: op for op in ops if op.kind is OpKind.LAUNCH}
    found = []
    for op in ops:
        if op.target == "aten.sym_size.int":
            op = replace(op, inputs=tuple(name for name in op.inputs if name not in launches))
        if op.kind is OpKind.OUTPUT:
            names = {name: f"{name}_waited" for name in op.inputs if name in launches}
            found += [
                OpNode(wait, OpKind.WAIT, "wait", (name,), launches[name].storages, launch=name)
                for name, wait in names.items()
            ]
            op = replace(op, inputs=tuple(names.get(name, name) for name in op.inputs))
        found.append(op)
    return tuple(found)


def _with_roles(ops: Sequence[OpNode]) -> tuple[OpNode, ...]:
    """A gather of what only inputs lead to is a parameter's; a reduction that only leads out is a gradient's."""
    static: set[str] = set()
    for op in ops:
        if op.kind is OpKind.INPUT or (_moves_data(op) and all(name in static for name in op.inputs)):
            static.add(op.name)
    readers: dict[str, list[OpNode]] = {op.name: [] for op in ops}
    for op in ops:
        for name in op.inputs:
            readers[name].append(op)
    leaving: set[str] = set()
    for op in reversed(ops):
        passes = op.kind in (OpKind.OUTPUT, OpKind.WAIT) or _moves_data(op) or _reduces(op)
        if passes and all(reader.name in leaving for reader in readers[op.name]):
            leaving.add(op.name)
    return tuple(_with_role(op, static, leaving) for op in ops)


def _with_role(op: OpNode, static: set[str], leaving: set[str]) -> OpNode:
    if op.collective is None:
        return op
    gathers = op.collective.kind is CollectiveKind.ALL_GATHER and all(name in static for name in op.inputs)
    role = Role.PARAMETER if gathers else Role.GRADIENT if op.name in leaving else Role.ACTIVATION
    return replace(op, collective=replace(op.collective, role=role))


def _moves_data(op: OpNode) -> bool:
    return op.kind is OpKind.VIEW or (op.kind is OpKind.COMPUTE and op.category in _MOVES_DATA and not op.writes)


def _reduces(op: OpNode) -> bool:
    return op.collective is not None and op.collective.kind in _REDUCES


def _storages(data: Mapping[str, Any], ops: Sequence[OpNode]) -> tuple[Storage, ...]:
    """Parameters (``primals``) are held, as in the recorder's own count."""
    owner: dict[int, OpNode] = {}
    for op in ops:
        for storage in op.storages:
            owner.setdefault(storage, op)
    return tuple(
        Storage(
            number,
            size_bytes,
            owner[number].name,
            held=owner[number].kind is OpKind.INPUT and owner[number].name.startswith("primals"),
        )
        for number, size_bytes in enumerate(data["storage_bytes"])
    )


def _peer(reference: Mapping[str, Any]) -> Peer:
    runs = reference["native_torch_2.13"]
    written_peak = reference["before"]["peak_H"]
    order, frugal = runs["r_reorder"], runs["r_mem0"]
    bucketed = min((runs[name] for name in runs if name[:2] in ("a_", "b_")), key=lambda run: run["sim_ms"])
    return Peer(
        step_us=order["sim_ms"] * 1e3,
        peak_ratio=order["peak_H"] / written_peak,
        frugal_us=frugal["sim_ms"] * 1e3,
        frugal_peak_ratio=frugal["peak_H"] / written_peak,
        bucketed_us=bucketed["sim_ms"] * 1e3,
        bucketed_peak_ratio=bucketed["peak_H"] / written_peak,
        bucketed_planning_s=bucketed["cpu_s"],
        planning_s=order["cpu_s"],
    )
