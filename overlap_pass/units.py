"""The only place where units are converted or spelled.

Inside the package times are ``_ns`` (integers, on a timeline) or ``_us`` (floats, costs) and sizes are ``_bytes``
(integers). Sizes follow the binary convention (1 GiB = 2**30 bytes) with the decimal one accepted on input.
"""

from __future__ import annotations

import re

from overlap_pass.errors import OptionError

__all__ = ["format_bytes", "format_us", "ns_to_us", "parse_bytes", "us_to_ns"]

_SCALE = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b)", re.IGNORECASE)


def parse_bytes(text: str, *, option: str) -> int:
    """Read a size such as ``"60GiB"``, ``"512 MB"`` or ``"4096B"`` as bytes.

    Raises:
        OptionError: the text is no size; the message names ``option``.

    >>> parse_bytes("2GiB", option="memory_budget")
    2147483648
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{option}={text!r} is no size: write a number with a unit, such as '60GiB' or '512MB'")
    number, unit = match.groups()
    return int(float(number) * _SCALE[unit.lower()])


def format_bytes(size_bytes: int) -> str:
    """Three significant digits in binary units: ``11.4 GiB``, ``512 MiB``, ``0 B``.

    >>> format_bytes(12240656794)
    '11.4 GiB'
    """
    magnitude = abs(float(size_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if magnitude < 1024:
            break
        magnitude /= 1024
    else:
        unit = "TiB"
    sign = "-" if size_bytes < 0 else ""
    digits = 0 if unit == "B" or magnitude >= 100 else 1 if magnitude >= 10 else 2
    return f"{sign}{magnitude:.{digits}f} {unit}"


def format_us(time_us: float, *, like_us: float | None = None) -> str:
    """Microseconds below one millisecond, else milliseconds: ``83.2 ms``, ``45.0 µs``.

    ``like_us`` chooses the unit in its place, so that figures that stand side by side share one.

    >>> format_us(83_200.0)
    '83.2 ms'
    >>> format_us(700.0, like_us=83_200.0)
    '0.7 ms'
    """
    if abs(time_us if like_us is None else like_us) < 1000:
        return f"{time_us:.1f} µs"
    return f"{time_us / 1000:.1f} ms"


def us_to_ns(time_us: float) -> int:
    """Microseconds to whole nanoseconds, rounded to the nearest."""
    return round(time_us * 1000)


def ns_to_us(time_ns: int) -> float:
    """Nanoseconds to microseconds."""
    return time_ns / 1000
