"""The trace files behind what a user names: files, globs and folders."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from overlap_pass.errors import TraceError

__all__ = ["find_traces"]

_ENDINGS = (".json", ".json.gz")


def find_traces(names: Iterable[str]) -> tuple[Path, ...]:
    """Every file once, in the order of the names; what a glob or a folder holds is sorted by name.

    Raises:
        TraceError: a name stands for nothing.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(_ENDINGS))
        elif path.exists():
            inside = [path]
        else:
            inside = sorted(file for match in glob.glob(name, recursive=True) if (file := Path(match)).is_file())
        if not inside:
            what = "holds no .json or .json.gz file" if path.is_dir() else "no such file, and no file matches it"
            raise TraceError(f"{name}: {what}")
        found.update(dict.fromkeys(inside))
    return tuple(found)
