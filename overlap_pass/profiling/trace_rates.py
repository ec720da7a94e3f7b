"""What a profiler trace tells of the machine it was taken on: collectives, matrix products, launches.

A collective's kernel runs from the moment its own rank is there until the slowest peer has come and the bytes have
moved, so of all kernels of one kind, size and group, over all files given, the shortest is taken: the one for which
nobody waited. What a trace does not hold (shapes are written only with ``record_shapes=True``) is left out by name.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from overlap_pass.cost.calibration import Measurements
from overlap_pass.cost.fit import CollectiveSample, KernelSample
from overlap_pass.errors import TraceError
from overlap_pass.graph.program import CollectiveKind
from overlap_pass.traces.collectives import collective_kind, payload_bytes

__all__ = ["TraceRates", "trace_rates"]

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm")
_HALF = ("c10::BFloat16", "c10::Half")
_LEAST_SIZES = 3
_LEAST_LAUNCHES = 20
_LEAST_FLOPS = 1e10

_Event = Mapping[str, Any]


@dataclass(frozen=True)
class TraceRates:
    """What was found, and the name of the device (``None`` where the trace does not say)."""

    measurements: Measurements
    device_name: str | None


@dataclass
class _Found:
    """Observations of all files."""

    collectives: dict[tuple[CollectiveKind, int, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    products: dict[tuple[tuple[int, ...], ...], list[float]] = field(default_factory=lambda: defaultdict(list))
    launch_gaps_us: list[float] = field(default_factory=list)
    collective_calls_us: list[float] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


def trace_rates(
    paths: Sequence[Path], gpus_per_node: int, *, progress: Callable[[str], None] = lambda _: None
) -> TraceRates:
    """Read the traces of one or more ranks of a run.

    Args:
        gpus_per_node: of the machine; a trace does not say which ranks share a node.
        progress: told of each file.

    Raises:
        TraceError: a file cannot be read.
    """
    found = _Found()
    for number, path in enumerate(paths, 1):
        progress(f"reading {path.name}, {number} of {len(paths)}")
        document = _load(path)
        found.devices += [str(one["name"]) for one in document.get("deviceProperties", ()) if "name" in one]
        _observe([event for event in document["traceEvents"] if event.get("ph") == "X"], found)
    left_out: list[str] = []
    measurements = Measurements(
        collectives=tuple(_collectives(found, gpus_per_node, left_out)),
        gemms=tuple(_gemms(found, left_out)),
        kernel_launch_us=_quartile(found.launch_gaps_us, "launches", left_out),
        collective_launch_us=median(found.collective_calls_us) if found.collective_calls_us else None,
        left_out=(*left_out, "attention, memory rate, contention, copy engine: a trace does not tell them apart"),
    )
    return TraceRates(measurements, found.devices[0] if found.devices else None)


def _load(path: Path) -> dict[str, Any]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(content)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"trace {str(path)!r} cannot be read: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceError(f"trace {str(path)!r} holds no traceEvents: give a trace that torch.profiler exported")
    return document


def _observe(events: Iterable[_Event], found: _Found) -> None:
    products: dict[object, tuple[tuple[int, ...], ...]] = {}
    kernels: list[_Event] = []
    launches: dict[tuple[object, object], list[float]] = defaultdict(list)
    for event in events:
        category, name, args = str(event.get("cat", "")).lower(), str(event.get("name", "")), event.get("args") or {}
        if category == "kernel":
            kernels.append(event)
        elif category == "cpu_op" and name in _PRODUCTS:
            if (shapes := _factors(name, args)) is not None:
                products[args.get("External id")] = shapes
        elif category == "cpu_op" and name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            found.collective_calls_us.append(float(event["dur"]))
        elif category in ("cuda_runtime", "cuda_driver") and "LaunchKernel" in name:
            launches[event.get("pid"), event.get("tid")].append(float(event["ts"]))
    for starts_us in launches.values():
        starts_us.sort()
        found.launch_gaps_us += [after - before for before, after in pairwise(starts_us)]
    for kernel in kernels:
        _observe_kernel(kernel, products, found)


def _observe_kernel(kernel: _Event, products: Mapping[object, tuple[tuple[int, ...], ...]], found: _Found) -> None:
    args, name = kernel.get("args") or {}, str(kernel.get("name", ""))
    if "Collective name" in args:
        kind, size_bytes, ranks = collective_kind(args, "", name), payload_bytes(args), args.get("Group size")
        if kind in set(CollectiveKind) and size_bytes and isinstance(ranks, int) and ranks > 1:
            found.collectives[CollectiveKind(kind), size_bytes, ranks].append(float(kernel["dur"]))
    elif (shapes := products.get(args.get("External id"))) is not None and "splitK" not in name:
        found.products[shapes].append(float(kernel["dur"]))


def _factors(name: str, args: Mapping[str, Any]) -> tuple[tuple[int, ...], ...] | None:
    """Shapes of the two factors, where they are written and of 16 bits."""
    shapes = [tuple(shape) for shape in args.get("Input Dims", ()) if isinstance(shape, list) and len(shape) >= 2]
    types = [kind for kind in args.get("Input type", ()) if kind in _HALF]
    matrices = shapes[-2:] if name == "aten::addmm" else shapes[:2]
    if len(types) < 2 or len(matrices) != 2 or not all(isinstance(n, int) for shape in matrices for n in shape):
        return None
    return matrices[0], matrices[1]


def _collectives(found: _Found, gpus_per_node: int, left_out: list[str]) -> Iterator[CollectiveSample]:
    sizes = {size_bytes for _, size_bytes, _ in found.collectives}
    if len(sizes) < _LEAST_SIZES:
        left_out.append(f"links: collectives of {len(sizes)} sizes are named in the trace, {_LEAST_SIZES} are needed")
        return
    for (kind, size_bytes, ranks), times_us in sorted(found.collectives.items()):
        yield CollectiveSample(kind, size_bytes, ranks, min(ranks, gpus_per_node), min(times_us))


def _gemms(found: _Found, left_out: list[str]) -> Iterator[KernelSample]:
    if not found.products:
        left_out.append("matrix products: no shapes of 16-bit products in the trace; take it with record_shapes=True")
        return
    work = {shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] for shapes in found.products}
    large = {shapes: flops for shapes, flops in work.items() if flops >= _LEAST_FLOPS}
    if not large:
        left_out.append(f"matrix products: none of {_LEAST_FLOPS / 1e9:.0f} GFLOP or more: none is bound by its work")
    for shapes, flops in sorted(large.items()):
        left, right = shapes
        yield KernelSample(f"GEMM {' × '.join(map(str, (*left, right[-1])))}", flops, median(found.products[shapes]))


def _quartile(values: Sequence[float], what: str, left_out: list[str]) -> float | None:
    """The lower quartile: what a launch takes where the CPU had nothing else to do between two."""
    if len(values) < _LEAST_LAUNCHES:
        left_out.append(f"{what}: {len(values)} in the trace, {_LEAST_LAUNCHES} are needed")
        return None
    return quantiles(values, n=4)[0]
