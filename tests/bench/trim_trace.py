"""Cuts a profiler trace down to two steps and to what an analysis needs, for use as test data; run by hand.

    python -m tests.bench.trim_trace rank0.json.gz tests/data/traces/fsdp2-eager-rank0.json.gz --what "eager FSDP2, 2 × H200"

Kept are, of two steps in the middle, what the CPU did, and what it launched on the device or what else ran there; of the
arguments of events those that the analysis reads. Directories are taken out of all paths. Times stay as written. Reference
figures, counted by a raster and not by the analysis, go into ``MANIFEST.json`` beside the output.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.pure.raster import raster_figures

_ON_CPU = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "hip_runtime", "python_function"}
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
_OF_LIBRARY = re.compile(r"<|torch/|nn\.Module|.*(?:site-packages|dist-packages|lib/python)")
_ARGUMENTS = {"device", "stream", "correlation", "grid"}
_OF_COLLECTIVES = {
    "Collective name",
    "Comms Id",
    "In msg nelems",
    "Out msg nelems",
    "Process Group Name",
    "Process Group Ranks",
    "Seq",
    "dtype",
}
_DIRECTORIES = re.compile(r"(?:[A-Za-z]:\\|/)(?:[^\s/\\:\"'(),;]+[/\\])+")
_MARK = re.compile(r"ProfilerStep#(\d+)$")
_MOST_BYTES = 1_000_000

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, metavar="IN")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--first", type=int, metavar="N", help="number of the first step to keep; else the middle one")
    parser.add_argument("--what", default="", help="a line on where the trace comes from, for the manifest")
    args = parser.parse_args()
    content = trimmed(_load(args.trace), args.first)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Without a time of its own in the header, so that the same input gives the same bytes.
    args.out.write_bytes(gzip.compress(content.encode(), mtime=0))
    size = args.out.stat().st_size
    print(f"{args.out}: {size / 1000:.0f} kB, of {len(content) / 1e6:.1f} MB of text")
    if size > _MOST_BYTES:
        sys.exit(f"{args.out}: more than {_MOST_BYTES / 1e6:.0f} MB; profile a smaller model")
    _enter(args.out, args.what)


def _load(path: Path) -> Row:
    content = path.read_bytes()
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    document: Row = json.loads(text, parse_float=Decimal, strict=False)
    return document


def trimmed(document: Row, first: int | None = None) -> str:
    """The text of a trace with two steps of ``document``."""
    rows = [row for row in document["traceEvents"] if row.get("ph") == "X"]
    begin, end = _window(rows, first)
    on_cpu = [row for row in rows if row.get("cat") in _ON_CPU and _ends(row) > begin and row["ts"] < end]
    launched = {row["args"]["correlation"] for row in on_cpu if "correlation" in row.get("args", {})} - {0}
    last = max(
        (
            _ends(row)
            for row in rows
            if row.get("cat") in _ON_DEVICE and row.get("args", {}).get("correlation") in launched
        ),
        default=end,
    )
    kept = [row for row in rows if _is_of_use(row, launched, (begin, last))]
    kept = [row for row in on_cpu if not _is_library(row)] + kept
    head = {
        "schemaVersion": document.get("schemaVersion", 1),
        "distributedInfo": {
            key: document.get("distributedInfo", {})[key]
            for key in ("backend", "rank", "world_size", "nccl_version")
            if key in document.get("distributedInfo", {})
        },
        "baseTimeNanoseconds": document.get("baseTimeNanoseconds", 0),
    }
    events = ",\n".join(map(_text, sorted(kept, key=lambda row: row["ts"])))
    return json.dumps(head)[:-1] + f', "traceEvents": [\n{events}\n]}}\n'


def _window(rows: Iterable[Row], first: int | None) -> tuple[Decimal, Decimal]:
    marks = {
        int(match[1]): row
        for row in rows
        if row.get("cat") == "user_annotation" and (match := _MARK.match(row.get("name", "")))
    }
    pairs = [number for number in sorted(marks) if number + 1 in marks]
    if not pairs:
        sys.exit("no two steps that follow each other: profile at least two, with profiler.step()")
    number = pairs[len(pairs) // 2] if first is None else first
    if number not in pairs:
        sys.exit(f"no steps {number} and {number + 1}: there are {', '.join(map(str, sorted(marks)))}")
    return marks[number]["ts"], _ends(marks[number + 1])


def _ends(row: Row) -> Decimal:
    end: Decimal = row["ts"] + row.get("dur", 0)
    return end


def _is_of_use(row: Row, launched: set[int], window: tuple[Decimal, Decimal]) -> bool:
    """What was launched by what is kept, and what else ran meanwhile: an earlier step's, or what no call is recorded for."""
    if row.get("cat") not in _ON_DEVICE:
        return False
    runs = window[0] < _ends(row) and row["ts"] < window[1]
    if row["cat"] == "gpu_user_annotation":
        return row["name"].startswith("nccl:") and runs
    return row.get("args", {}).get("correlation") in launched or runs


def _is_library(row: Row) -> bool:
    mark = _MARK.match(row["name"])
    return bool(row["cat"] == "python_function" and _OF_LIBRARY.match(row["name"])) or bool(
        mark and row["cat"] == "cpu_op"
    )


def _text(row: Row) -> str:
    args = row.get("args", {})
    names = _ARGUMENTS | _OF_COLLECTIVES if "Collective name" in args else _ARGUMENTS
    kept = {key: _anonymous(value) for key, value in args.items() if key in names}
    fields = [f'"ph": "X", "cat": "{row["cat"]}", "name": {json.dumps(_anonymous(row["name"]))}']
    fields += [f'"pid": {json.dumps(row["pid"])}, "tid": {json.dumps(row["tid"])}']
    fields += [f'"ts": {row["ts"]}, "dur": {row.get("dur", 0)}, "args": {json.dumps(kept)}']
    return "{" + ", ".join(fields) + "}"


def _anonymous(value: object) -> object:
    """
    >>> _anonymous("/data/someone/project/train.py(42): step")
    'train.py(42): step'
    """
    return _DIRECTORIES.sub("", value) if isinstance(value, str) else value


def _enter(path: Path, what: str) -> None:
    manifest = path.parent / "MANIFEST.json"
    entries = json.loads(manifest.read_text()) if manifest.exists() else {}
    about = {"what": what, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "steps": raster_figures(path)}
    entries[path.name] = about
    manifest.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")


if __name__ == "__main__":
    main()
