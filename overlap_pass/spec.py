"""Spec strings: how a frozen dataclass of options is spelled in Python options, on the command line and in reports.

``latest_start`` is the dataclass named so with its defaults, ``latest_start{margin=1.25, hoist=false}`` the same with
two fields set. Values are integers, floats, ``true``/``false`` or bare words; only fields that differ from their
default are printed, in the order of the dataclass, so two equal objects always have the same spec.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable
from typing import Any

from overlap_pass.errors import OptionError

__all__ = ["build", "nearest", "spec", "split"]

_SPEC = re.compile(r"(?P<name>[a-z_][a-z0-9_]*)\s*(?:\{(?P<body>[^{}]*)\})?")
_WORD = re.compile(r"[^\s,={}](?:[^,={}]*[^\s,={}])?")
_BOOL = {"true": True, "false": False}
_KIND = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint to append to an error message: the known words, and the nearest one if there is any.

    >>> nearest("latest_strat", ["as_written", "latest_start"])
    "did you mean 'latest_start'? (known: as_written, latest_start)"
    """
    names = sorted(known)
    hint = f"known: {', '.join(names)}"
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}? ({hint})" if close else hint


def split(text: str, *, option: str) -> tuple[str, dict[str, str]]:
    """Split a spec into its name and the raw text of its fields.

    >>> split("latest_start{margin=1.25, hoist=false}", option="strategy")
    ('latest_start', {'margin': '1.25', 'hoist': 'false'})

    Raises:
        OptionError: the text is no spec, or sets a field twice; the message names ``option``.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{option}={text!r} is no spec: write 'name' or 'name{{key=value, key=value}}'")
    fields: dict[str, str] = {}
    for part in (match["body"] or "").split(","):
        if not part.strip():
            continue
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or _WORD.fullmatch(value) is None:
            raise OptionError(f"{option}={text!r}: {part.strip()!r} is no 'key=value'")
        if key in fields:
            raise OptionError(f"{option}={text!r} sets {key!r} twice")
        fields[key] = value
    return match["name"], fields


def build(cls: type[Any], fields: dict[str, str], *, option: str) -> Any:
    """Make ``cls`` from the raw text of its fields, each read as the type that the dataclass declares.

    Raises:
        OptionError: unknown field, or a value that is not of the field's type; the message names both.
    """
    kinds = _field_kinds(cls)
    values = {}
    for key, text in fields.items():
        if key not in kinds:
            hint = nearest(key, kinds) if kinds else f"{cls.name} takes no options"
            raise OptionError(f"{option}: {cls.name} has no option {key!r}: {hint}")
        values[key] = _read(text, kinds[key], where=f"{option}: {cls.name}{{{key}={text}}}")
    return cls(**values)


def spec(options: Any) -> str:
    """The spec string of a dataclass instance that has a ``name``.

    Raises:
        OptionError: a text field holds what a spec cannot spell (``,``, ``=``, a brace, outer blanks, nothing).
    """
    parts = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        parts.append(f"{field.name}={_spell(value, where=f'{options.name}.{field.name}')}")
    return f"{options.name}{{{', '.join(parts)}}}" if parts else str(options.name)


def _field_kinds(cls: type[Any]) -> dict[str, type]:
    hints = typing.get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}
    for name, kind in kinds.items():
        if kind not in _KIND:
            raise TypeError(f"{cls.__name__}.{name}: {kind} cannot be an option; use bool, int, float or str")
    return kinds


def _read(text: str, kind: type, *, where: str) -> bool | int | float | str:
    try:
        return _BOOL[text] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise OptionError(f"{where}: {text!r} is not {_KIND[kind]}") from None


def _spell(value: Any, *, where: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and _WORD.fullmatch(value) is None:
        raise OptionError(f"{where}={value!r} cannot be written in a spec: no ',', '=', braces or outer blanks")
    return str(value)
