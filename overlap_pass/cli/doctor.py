"""``overlap-pass doctor``: is this installation complete, and if not, what is missing?"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

__all__ = ["Finding", "add_parser", "examine", "run"]

PYTHON = (3, 11)
REQUIRED = {"torch": (2, 11), "networkx": (3, 2), "numpy": (1, 26), "rich": (13, 7)}
TESTED_TORCH = (2, 13)
OPTIONAL = {"torch-tb-profiler": "tensorboard", "ortools": "exact", "shtab": "completion"}
BACKENDS = ("overlap", "overlap_eager")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what.
        state: ``"ok"``, ``"failed"`` (required, and missing or unfit) or ``"optional"`` (absent, needed for some commands only).
        detail: version or number found, or what to do.
    """

    name: str
    state: str
    detail: str


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check the installation and name what is missing",
        description="Check Python, torch, the registered backends and the GPUs; exit with 1 if something is missing.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = list(examine())
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state:<8}  {finding.name:<{width}}  {finding.detail}")
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """Look at everything; what comes later is skipped where what it needs is missing."""
    yield examine_python(sys.version_info[:3])
    packages = [examine_package(name, minimum) for name, minimum in REQUIRED.items()]
    yield from packages
    yield from (examine_backend(name) for name in BACKENDS)
    if packages[0].state == "ok":
        yield from _examine_torch()
    for name, extra in OPTIONAL.items():
        yield _examine_optional(name, extra)


def examine_python(found: tuple[int, ...]) -> Finding:
    text = ".".join(map(str, found))
    if found >= PYTHON:
        return Finding("python", "ok", text)
    return Finding("python", "failed", f"{text} is too old: use Python {_dotted(PYTHON)} or newer")


def examine_package(name: str, minimum: tuple[int, int]) -> Finding:
    found = _installed(name)
    if found is None:
        return Finding(name, "failed", f"not installed: pip install '{name}>={_dotted(minimum)}'")
    if _release(found) < minimum:
        return Finding(name, "failed", f"{found} is too old: pip install '{name}>={_dotted(minimum)}'")
    if name == "torch" and _release(found)[:2] > TESTED_TORCH:
        return Finding(name, "ok", f"{found}, newer than any that was tested (up to {_dotted(TESTED_TORCH)})")
    return Finding(name, "ok", found)


def examine_backend(name: str) -> Finding:
    """Whether torch.compile finds the backend by its name; one that cannot be imported is not loaded here."""
    from importlib import metadata

    title = f"backend {name}"
    found = [entry for entry in metadata.entry_points(group="torch_dynamo_backends") if entry.name == name]
    if not found:
        return Finding(
            title, "failed", "not registered: pip install overlap-pass again (`pip install .` in its checkout)"
        )
    owners = {entry.dist.name if entry.dist else "?" for entry in found}
    if owners != {"overlap-pass"}:
        return Finding(title, "failed", f"claimed by {', '.join(sorted(owners))}: uninstall all but overlap-pass")
    return Finding(title, "ok", found[0].value)


def _examine_torch() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("torch import", "failed", f"torch is installed but cannot be imported: {error}")
        return
    gloo = dist.is_available() and dist.is_gloo_available()
    yield Finding("gloo", "ok", "available") if gloo else Finding("gloo", "failed", "torch was built without it")
    if not torch.cuda.is_available():
        yield Finding("cuda", "optional", "no CUDA device: planning and the demo work, `verify` needs two GPUs")
        yield _examine_compiler()
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    yield Finding("cuda", "ok", f"{torch.cuda.device_count()} × {', '.join(names)} (CUDA {torch.version.cuda})")
    if dist.is_nccl_available():
        yield Finding("nccl", "ok", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("nccl", "failed", "torch was built without it: install the CUDA build of torch")
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    yield examine_peers(sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs), len(pairs))
    yield examine_connections(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))


def examine_peers(reachable: int, pairs: int) -> Finding:
    """Copy engines carry parameters where every GPU can reach the memory of every other."""
    name = "copy engines"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return Finding(name, "optional", "not used: NCCL_P2P_DISABLE=1 forbids access to peers")
    if not pairs or reachable < pairs:
        detail = (
            f"not used: {reachable} of {pairs} pairs of GPUs reach each other's memory" if pairs else "one GPU only"
        )
        return Finding(name, "optional", detail)
    return Finding(name, "ok", "all GPUs reach each other's memory")


def examine_connections(setting: str | None) -> Finding:
    """With one hardware queue the kernels of all streams start in the order they were launched in."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if setting == "1":
        return Finding(name, "failed", "is 1: streams share one queue and collectives cannot overlap freely; unset it")
    return Finding(name, "ok", setting or "not set")


def _examine_compiler() -> Finding:
    found = next((name for name in (os.environ.get("CXX"), "g++", "clang++") if name and shutil.which(name)), None)
    if found:
        return Finding("C++ compiler", "ok", found)
    return Finding("C++ compiler", "optional", "none: on a CPU `overlap` needs one, `overlap_eager` does not")


def _examine_optional(name: str, extra: str) -> Finding:
    found = _installed(name)
    if found is None:
        return Finding(name, "optional", f"pip install 'overlap-pass[{extra}]' adds it")
    return Finding(name, "ok", found)


def _installed(name: str) -> str | None:
    """The version of a distribution, ``None`` where it is not there."""
    from importlib import metadata  # takes longer than all that the other commands import to start

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _release(text: str) -> tuple[int, ...]:
    """``"2.13.0+cpu"`` → ``(2, 13, 0)``."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
