"""How output looks: colours only on a terminal that wants them, and no wider than is read well."""

from __future__ import annotations

import os
import shutil
import sys

__all__ = ["colour", "width"]


def colour() -> bool:
    """Whether stdout is a terminal and https://no-color.org is not asked for."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def width(most: int = 120) -> int:
    """Columns of the terminal, 100 where there is none, and at most ``most``."""
    return min(shutil.get_terminal_size((100, 24)).columns, most)
