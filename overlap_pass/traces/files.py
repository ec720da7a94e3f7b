"""The trace files behind what a user names: files, globs and folders."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from overlap_pass.errors import TraceError

__all__ = ["find_traces"]

_ENDINGS = (".json", ".json.gz")


def find_traces(names: Iterable[str]) -> tuple[Path, ...]:
    """Every file once, in the order of the names; what a glob or a folder holds is sorted by name. A link to a file that is
    there already counts as that file.

    Raises:
        TraceError: a name stands for nothing.
    """
    found: dict[tuple[int, int], Path] = {}
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
        for file in inside:
            about = file.stat()
            found.setdefault((about.st_dev, about.st_ino), file)
    return tuple(found.values())
