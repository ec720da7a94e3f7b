"""Changes to a model that can be taken back, exactly and in reverse order."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch import nn

__all__ = ["Journal"]

_ABSENT = object()


class Journal:
    """Writes to classes and dictionaries, remembering what was there.

    Everything that a conversion changes is a module's class or an entry of a dictionary (a hook keeps its id and its
    place when the callable under its id is exchanged), so these two are enough to undo all of it.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_class(self, module: nn.Module, cls: type[nn.Module]) -> None:
        before = type(module)
        module.__class__ = cls
        self._undo.append(lambda: setattr(module, "__class__", before))

    def set_entry(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        self._undo.append(lambda: _put_back(mapping, key, before))

    def set_first(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """A new entry in front of all others."""
        others = list(mapping.items())
        for name, _ in reversed(others):
            self.drop_entry(mapping, name)
        for name, entry in ((key, value), *others):
            self.set_entry(mapping, name, entry)

    def drop_entry(self, mapping: MutableMapping[Any, Any], key: Any) -> None:
        before = mapping.pop(key)
        self._undo.append(lambda: _put_back(mapping, key, before))

    def undo(self) -> None:
        """Take back every change, the last first; the journal is empty afterwards."""
        while self._undo:
            self._undo.pop()()


def _put_back(mapping: MutableMapping[Any, Any], key: Any, before: Any) -> None:
    if before is not _ABSENT:
        mapping[key] = before
    elif key in mapping:
        del mapping[key]
