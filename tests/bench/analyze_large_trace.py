"""How long and how much memory ``overlap-pass analyze`` needs, beside Holistic Trace Analysis; not a test, run by hand.

    python -m tests.bench.analyze_large_trace --megabytes 1000 [--keep trace.json]
    python -m tests.bench.analyze_large_trace rank0.json.gz … --holistic PYTHON --rounds 3

Analyzes the files named, or one that it writes: like a trace of an eager FSDP2 run with stacks. Each run is a process of its
own. ``--holistic`` runs HTA (PyPI ``traceinsight``) on the same files in turns, with the interpreter given, and asks it for
its overlap and its temporal breakdown, which is less than ``analyze`` says. Times are of the CPU, all threads, with the start;
modules are compiled before, as pip leaves them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

_STEP_US = 200_000
_LAYERS = 32
_OPS = 60

_FRAMES = (
    "train.py(42): step",
    "torch/nn/modules/module.py(1776): _call_impl",
    "torch/nn/modules/linear.py(130): forward",
)
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_MATMUL = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
_SHAPE = '"registers per thread": 96, "shared memory": 87568, "grid": [132, 1, 1], "block": [384, 1, 1]'
_COLLECTIVE = (
    ', "Collective name": "_allgather_base", "In msg nelems": 6637568, "Out msg nelems": 13275136, "dtype": "BFloat16", '
    '"Process Group Name": "0", "Process Group Ranks": "[0, 1]"'
)

_ANALYZE = "import sys; from overlap_pass.cli.main import main; main(['analyze', sys.argv[1]])"
_HOLISTIC = """
import sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
print(analysis.get_comm_comp_overlap(visualize=False))
print(analysis.get_temporal_breakdown(visualize=False))
"""
_MEASURED = """
import resource, sys
used = resource.getrusage(resource.RUSAGE_SELF)
sys.stderr.write(f'\\nUSED {used.ru_maxrss} {used.ru_utime + used.ru_stime}')
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the trace that is written")
    parser.add_argument("--keep", type=Path, help="write the trace here and leave it")
    parser.add_argument("--holistic", metavar="PYTHON", help="an interpreter that has traceinsight")
    parser.add_argument("--rounds", type=int, default=1, help="the median of so many runs is printed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = args.traces or [args.keep or Path(folder) / "rank0.json"]
        if not paths[0].exists():
            _write(paths[0], args.megabytes * 1_000_000)
        print("| trace | size | overlap-pass | HTA | factor |\n| --- | --- | --- | --- | --- |")
        for path in paths:
            print(_row(path, args.holistic, args.rounds), flush=True)


def _row(path: Path, holistic: str | None, rounds: int) -> str:
    ours, theirs = [], []
    _measure(sys.executable, _ANALYZE, path)
    for _ in range(rounds):
        ours.append(_measure(sys.executable, _ANALYZE, path))
        if holistic:
            theirs.append(_measure(holistic, _HOLISTIC, path))
    name = f"{path.parent.name}/{path.name} | {path.stat().st_size / 1e6:.1f} MB"
    (our_s, our_mib), (their_s, their_mib) = _median(ours), _median(theirs)
    if not theirs:
        return f"| {name} | {our_s:.2f} s, {our_mib:.0f} MiB | | |"
    factor = f"{their_s / our_s:.1f}× time, {their_mib / our_mib:.1f}× memory"
    return f"| {name} | {our_s:.2f} s, {our_mib:.0f} MiB | {their_s:.2f} s, {their_mib:.0f} MiB | {factor} |"


def _median(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return (median(run[0] for run in runs), median(run[1] for run in runs)) if runs else (0.0, 0.0)


def _measure(python: str, program: str, path: Path) -> tuple[float, float]:
    """(seconds of CPU, largest resident size in MiB) of a process."""
    # Beside the file: Python looks for modules in the working folder first.
    command = [python, "-c", program + _MEASURED, str(path.absolute())]
    with_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent, env=with_bytecode)
    used = done.stderr.rpartition("USED ")[2].split()
    if done.returncode or len(used) != 2:
        sys.exit(f"{path}: failed: {done.stderr[-400:]}")
    return float(used[1]), int(used[0]) / 1024


def _write(path: Path, size_bytes: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},\n')
        file.write('  "traceEvents": [\n')
        step = 0
        while file.tell() < size_bytes:
            file.write(",\n".join(_step(step)))
            step += 1
            file.write("\n" if file.tell() >= size_bytes else ",\n")
        file.write('  ],\n  "baseTimeNanoseconds": 1719853884000000000\n}')


def _step(step: int) -> Iterator[str]:
    begin = 4_458_676_000_000 + step * _STEP_US
    yield _event("user_annotation", f"ProfilerStep#{step}", begin, _STEP_US, "")
    slot = _STEP_US // (_LAYERS * _OPS)
    for layer in range(_LAYERS):
        at = begin + layer * _OPS * slot
        for op in range(_OPS):
            yield from _op(step, layer, op, at + op * slot, slot)


def _op(step: int, layer: int, op: int, at: int, slot: int) -> Iterator[str]:
    correlation = 1 + op + _OPS * (layer + _LAYERS * step)
    gathers = op == 0
    for depth, name in enumerate(_FRAMES):
        ids = f'"Python id": {correlation + depth}, "Python parent id": {correlation}'
        yield _event("python_function", name, at, slot - 1, ids)
    name = f"FSDP::all_gather (layers.{layer})" if gathers else "aten::linear"
    external = f'"External id": {correlation}, "Sequence number": {op}, "Fwd thread id": 0'
    yield _event("user_annotation" if gathers else "cpu_op", name, at + 1, slot // 2, external)
    for inner in ("aten::t", "aten::transpose", "c10d::_allgather_base_" if gathers else "aten::addmm"):
        shapes = (
            f'"External id": {correlation}, "Record function id": 0, "Input Dims": [[4096, 4096], [4096, 16384], []]'
        )
        yield _event("cpu_op", inner, at + 2, slot // 4, shapes)
    call = f'"External id": {correlation}, "cbid": 211, "correlation": {correlation}'
    yield _event("cuda_runtime", "cudaLaunchKernelExC", at + 3, 5, call)
    place = f'"ph": "s", "id": {correlation}, "pid": 100, "tid": 100, "ts": {at + 3}.000'
    yield f'  {{\n    {place},\n    "cat": "ac2g", "name": "ac2g"\n  }}'
    stream, length = (22, 8 * slot) if gathers else (7, slot - 3)
    args = f'"External id": {correlation}, "device": 0, "stream": {stream}, "correlation": {correlation}, {_SHAPE}'
    kernel = _GATHER if gathers else _MATMUL
    yield _event("kernel", kernel, at + slot, length, args + _COLLECTIVE * gathers, (0, stream))


def _event(category: str, name: str, start: int, length: int, args: str, place: tuple[int, int] = (100, 100)) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {place[0]}, "tid": {place[1]},\n'
        f'    "ts": {start}.125, "dur": {length}.250,\n    "args": {{\n      {args}\n    }}\n  }}'
    )


if __name__ == "__main__":
    main()
