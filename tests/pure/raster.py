"""Overlap figures of a trace by counting, step by step, the tenths of a microsecond in which something ran.

Independent of the analysis on purpose: it parses the file with ``json``, asks of each thing the simplest question that can
be asked, and adds up a raster instead of doing arithmetic on intervals. So it is slow, and off by the raster at each
boundary: two figures agree within :func:`tolerance_us`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]

TICKS_PER_US = 10
_COLLECTIVE = ("c10d::", "_c10d_functional::", "symm_mem::", "record_param_comms", "nccl:")


def raster_figures(path: Path) -> dict[str, dict[str, float]]:
    """``ProfilerStep`` number → microseconds of the device's step that compute, communicate, and so on.

    A step of the device lies between the ends of the last things that two neighbouring steps of the CPU launched; so the
    first one of a file has none.
    """
    rows = [row for row in _rows(path) if row.get("ph") == "X"]
    device = [row for row in rows if row["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and row["dur"] > 0]
    calls = {row["args"]["correlation"]: row for row in rows if "cuda_" in row["cat"] and "correlation" in row["args"]}
    ends = {}
    for mark in rows:
        if mark["name"].startswith("ProfilerStep#"):
            inside = [row for row in device if _launched_in(row, calls, mark)]
            ends[int(mark["name"][13:])] = max(row["ts"] + row["dur"] for row in inside)
    kinds = [_kind(row, calls, rows) for row in device]
    return {
        str(number): _count(device, kinds, (ends[number - 1], ends[number]))
        for number in sorted(ends)
        if number - 1 in ends
    }


def tolerance_us(path: Path) -> float:
    """Six standard deviations of the sum of all roundings: two for each event, each even within half a tick."""
    events = sum(row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") for row in _rows(path))
    return 6 * (2 * events / 12) ** 0.5 / TICKS_PER_US


def _rows(path: Path) -> list[Row]:
    rows: list[Row] = json.loads(gzip.decompress(path.read_bytes()), parse_float=Decimal)["traceEvents"]
    return rows


def _launched_in(row: Row, calls: dict[int, Row], mark: Row) -> bool:
    call = calls.get(row["args"].get("correlation"))
    return call is not None and bool(mark["ts"] <= call["ts"] < mark["ts"] + mark["dur"])


def _kind(row: Row, calls: dict[int, Row], rows: Iterable[Row]) -> str:
    if "Collective name" in row["args"] or re.match(r"(void )?(nccl|multimem_|rccl|Memcpy PtoP)", row["name"]):
        return "communication"
    call = calls.get(row["args"].get("correlation"))
    if row["cat"] == "kernel":
        return "compute"
    # A copy is a collective's if the shortest op around the call that made it is.
    around = [
        op
        for op in rows
        if call is not None
        and op["cat"] in ("cpu_op", "user_annotation")
        and (op["pid"], op["tid"]) == (call["pid"], call["tid"])
        and op["ts"] <= call["ts"] < op["ts"] + op["dur"]
    ]
    shortest = min(around, key=lambda op: op["dur"], default=None)
    return "communication" if shortest is not None and shortest["name"].startswith(_COLLECTIVE) else "copy"


def _count(device: Iterable[Row], kinds: Iterable[str], window: tuple[Decimal, Decimal]) -> dict[str, float]:
    length = _ticks(window[1] - window[0])
    on = {kind: np.zeros(length, bool) for kind in ("compute", "communication", "copy")}
    for row, kind in zip(device, kinds, strict=True):
        start, end = (_ticks(time - window[0]) for time in (row["ts"], row["ts"] + row["dur"]))
        on[kind][max(0, start) : max(0, end)] = True
    compute, communication, copy = on["compute"], on["communication"], on["copy"]
    counted = {
        "step_us": length,
        "compute_us": compute.sum(),
        "communication_us": communication.sum(),
        "exposed_us": (communication & ~compute).sum(),
        "exposed_copy_us": (copy & ~compute & ~communication).sum(),
        "idle_us": (~(compute | communication | copy)).sum(),
    }
    return {name: round(float(ticks) / TICKS_PER_US, 1) for name, ticks in counted.items()}


def _ticks(time_us: Decimal) -> int:
    return round(time_us * TICKS_PER_US)
