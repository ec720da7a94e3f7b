"""A comparison as a JSON file: strict JSON, readable, and with a line for each span so that two files can be diffed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from overlap_pass.errors import PlanError
from overlap_pass.report.comparison import Comparison

__all__ = ["dumps", "loads"]


def dumps(comparison: Comparison) -> str:
    """The JSON text of a comparison, ending in a newline.

    Raises:
        PlanError: a figure is infinite or not a number, which JSON cannot say; the message names the field.
    """
    data = comparison.to_json()
    for place, value in _numbers(data, "comparison"):
        if not math.isfinite(value):
            raise PlanError(f"{place} is {value}: a report holds finite numbers, and null where one is not known")
    return _layout(data, "") + "\n"


def loads(text: str) -> Comparison:
    """Read what :func:`dumps` wrote.

    Raises:
        PlanError: no JSON, ``NaN`` or ``Infinity`` in it, another schema, or a missing field.
    """
    try:
        data = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise PlanError(f"the report is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"the report is no JSON object but a {type(data).__name__}")
    return Comparison.from_json(data)


def _refuse(constant: str) -> None:
    raise PlanError(f"the report holds {constant}, which is no JSON")


def _numbers(value: Any, place: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield place, value
    elif isinstance(value, dict):
        for name, member in value.items():
            yield from _numbers(member, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for position, member in enumerate(value):
            yield from _numbers(member, f"{place}[{position}]")


def _layout(value: Any, indent: str) -> str:
    """Objects and lists of lists over several lines, everything flat on one."""
    members = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not any(isinstance(member, dict | list | tuple) for member in members):
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    deeper = indent + "  "
    if isinstance(value, dict):
        lines = [
            f"{deeper}{json.dumps(name, ensure_ascii=False)}: {_layout(member, deeper)}"
            for name, member in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _layout(member, deeper) for member in value) + f"\n{indent}]"
