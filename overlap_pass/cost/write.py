"""A machine as a hardware file: what :func:`~overlap_pass.cost.hardware.load_hardware` reads back, with its sources."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from overlap_pass.cost.contention import Contention
from overlap_pass.cost.hardware import Hardware

__all__ = ["to_toml"]


def to_toml(hardware: Hardware, *, heading: str = "", sources: Mapping[str, str] | None = None) -> str:
    """The text of a hardware file.

    Args:
        hardware: what to write; read back it is equal, up to six digits of each number.
        heading: lines of comment above everything.
        sources: ``"table.key"`` or ``"table"`` → where the number or the table comes from, as a comment beside it.
    """
    notes = sources or {}
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    lines.append(f"name = {json.dumps(hardware.name)}")
    for field in dataclasses.fields(hardware):
        value = getattr(hardware, field.name)
        if dataclasses.is_dataclass(value):
            lines += _table(field.name, value, notes)
    for kind, contention in sorted(hardware.contention_by_kind.items()):
        lines += _table(f"contention.{kind.value}", contention, notes, unlike=hardware.contention)
    return "\n".join(lines) + "\n"


def _table(name: str, value: Any, notes: Mapping[str, str], unlike: Contention | None = None) -> list[str]:
    """One table; of a table that inherits from ``unlike`` only what differs."""
    plain, nested = [], []
    for field in dataclasses.fields(value):
        entry = getattr(value, field.name)
        if isinstance(entry, Mapping):
            nested += [
                "",
                _noted(f"[{name}.{field.name}]", notes.get(f"{name}.{field.name}")),
                *(f"{key} = {_number(one)}" for key, one in entry.items()),
            ]
        elif entry is not None and (unlike is None or entry != getattr(unlike, field.name)):
            plain.append(_noted(f"{field.name} = {_number(entry)}", notes.get(f"{name}.{field.name}")))
    return ["", _noted(f"[{name}]", notes.get(name)), *plain, *nested]


def _noted(line: str, note: str | None) -> str:
    return f"{line}  # {note}" if note else line


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(f"{value:.6g}"))
