"""How many CTAs NCCL should have: what a collective takes, and what it takes from a GEMM, by CTAs of its group.

    torchrun --nproc-per-node 2 -m tests.bench.ctas --record ctas.json
    NCCL_P2P_DISABLE=1 torchrun --nproc-per-node 2 -m tests.bench.ctas --record ctas-host.json

Each row is a communicator of its own, made with ``ncclConfig``'s ``maxCTAs``; 0 leaves the choice to NCCL. A collective
that is hidden costs the step what the GEMM loses; one that is exposed costs its whole time: fewer CTAs pay only where the
first gets less and the second does not matter. Measured as ``overlap-pass calibrate`` does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from overlap_pass.graph.program import CollectiveKind
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.profiling.collective_rates import Group, beside_gemm, collective
from overlap_pass.profiling.stopwatch import Stopwatch

KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of collective over a communicator with so many CTAs; times in microseconds, the slowest rank's.

    Attributes:
        beside_us: its time beside GEMMs.
        lost_us: what GEMMs that run meanwhile take longer.
    """

    ctas: int
    kind: str
    payload_bytes: int
    alone_us: float
    beside_us: float
    lost_us: float


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ctas", default="0,2,4,8,16,32", help="separated by commas, 0 for NCCL's choice (%(default)s)"
    )
    parser.add_argument("--payload-bytes", type=int, default=218 * 2**20, help="full tensor in bytes (%(default)s)")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.exit(
            2, "tests.bench.ctas: CTAs are of NCCL's kernels: this needs at least 2 CUDA devices and torchrun\n"
        )
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = [row for ctas in map(int, args.ctas.split(",")) for row in measured(ctas, args.payload_bytes, device)]
    if dist.get_rank() == 0:
        print(table(rows), flush=True)
        if args.record is not None:
            args.record.write_text(json.dumps(record(rows), indent=1) + "\n", "utf-8")
    dist.destroy_process_group()
    return 0


def measured(ctas: int, payload_bytes: int, device: torch.device) -> Iterator[Row]:
    """All kinds over one new communicator; every rank calls it."""
    options = dist.ProcessGroupNCCL.Options()
    if ctas:
        options.config.max_ctas = ctas
    ranks = dist.get_world_size()
    process_group = dist.new_group(list(range(ranks)), pg_options=options)
    group = Group(f"{ctas} CTAs", process_group, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    scale = Scale.full()
    watch = Stopwatch(device, scale.batches)
    for kind in KINDS:
        run = collective(kind, payload_bytes, group, device)
        alone_us = watch.queued_us(run, 4)
        factors = beside_gemm(run, scale, watch)
        beside_us = alone_us * factors.communication_beside_compute
        lost_us = beside_us * (1.0 - 1.0 / factors.compute_beside_communication)
        yield Row(ctas, kind.value, payload_bytes, alone_us, beside_us, lost_us)
    dist.destroy_process_group(process_group)


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| CTAs | collective | alone, ms | beside GEMMs, ms | compute lost, ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.ctas or 'NCCL'} | {row.kind} | {row.alone_us / 1e3:.2f} | {row.beside_us / 1e3:.2f} | {row.lost_us / 1e3:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def record(rows: Sequence[Row]) -> dict[str, object]:
    return {
        "schema": "overlap-pass/ctas/1",
        "command": f"torchrun --nproc-per-node {dist.get_world_size()} -m tests.bench.ctas {shlex.join(sys.argv[1:])}",
        "hardware": f"{dist.get_world_size()} × {torch.cuda.get_device_name()}",
        "versions": {"torch": torch.__version__, "nccl": ".".join(map(str, torch.cuda.nccl.version()))},
        "environment": {
            name: os.environ[name] for name in ("NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE") if name in os.environ
        },
        "date": datetime.date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    raise SystemExit(main())
