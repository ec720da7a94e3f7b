"""Traces that a test draws, event by event."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GEMM = "sm90_xmma_gemm_bf16"
NCCL = "ncclDevKernel_AllGather_RING_LL(x)"

Row = dict[str, Any]


class Trace:
    """Writes a trace of one rank, event by event; times are in microseconds."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._correlation = 0

    def cpu(self, name: str, start: float, end: float, *, cat: str = "cpu_op", **args: Any) -> Trace:
        row = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 900,
            "tid": 901,
            "ts": start,
            "dur": end - start,
            "args": args,
        }
        self.rows.append(row)
        return self

    def call(self, name: str, start: float, end: float) -> Trace:
        return self.cpu(name, start, end, cat="cuda_runtime")

    def kernel(self, name: str, launch: float | None, start: float, end: float, **more: Any) -> Trace:
        """A kernel on stream 7, or stream 20 for collectives, launched by a call that begins at ``launch``."""
        self._correlation += 1
        stream = more.pop("stream", 20 if "nccl" in name else 7)
        call = more.pop("call", "cudaLaunchKernel")
        correlation = more.pop("correlation", self._correlation)
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        args = {"device": more.pop("device", 0), "stream": stream, "correlation": correlation, **more}
        self.rows.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": args["device"],
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )
        if launch is not None:
            self.cpu(call, launch, launch + 1, cat="cuda_runtime", correlation=correlation)
        return self

    def write(self, path: Path, **document: Any) -> Path:
        path.write_text(json.dumps({**document, "traceEvents": self.rows}))
        return path
