"""The memory budget: how many bytes the peak of a schedule may reach.

A budget is an object that answers one question, :meth:`Budget.resolve`; there is one small class for each way to say
it, and each has a spec string that reads back as the same budget.

================  =========================================================================================
``60GiB``         that many bytes (an ``int`` is taken as bytes)
``+2GiB``         that many bytes above the peak of the order as written
``1.05x``         that many times the peak of the order as written
``fsdp2``         the default: what eager FSDP2 needs, see :class:`Fsdp2`
``fsdp2+2GiB``    that many bytes above what eager FSDP2 needs
``unlimited``     no bound
================  =========================================================================================
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TypeVar

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import CollectiveKind, Program, Role
from overlap_pass.memory.staging import staging_bytes
from overlap_pass.units import parse_bytes

__all__ = ["Absolute", "Beside", "Budget", "Extra", "Factor", "Fsdp2", "Unlimited"]

_OPTION = "memory_budget"
_ACCEPTED = (
    "write bytes ('60GiB'), bytes above the peak as written ('+2GiB'), a factor of it ('1.05x'), 'fsdp2', 'fsdp2+2GiB' "
    "or 'unlimited'"
)
_FSDP2 = re.compile(r"fsdp2\s*\+(.*)", re.IGNORECASE)
_FACTOR = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*x", re.IGNORECASE)
_Number = TypeVar("_Number", int, float)
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


class Budget:
    """A bound on the peak of a schedule, in bytes once the program and its peak as written are known.

    Attributes:
        resident_bytes: what the process holds beside what the graph names; counted in peak and bound.
        cpu_ahead_us: how far the CPU is ahead of the device when the graph begins. No part of the bound; like the other, known
            only from the graph before.
        shared_bytes: what the ranks share for the gathers of the graph before.
    """

    resident_bytes: int = 0
    cpu_ahead_us: float = 0.0
    shared_bytes: int = 0

    @property
    def spec(self) -> str:
        """The text that :meth:`parse` reads as this budget."""
        raise NotImplementedError

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        """The bound in bytes, ``None`` where there is none; both with ``resident_bytes``."""
        raise NotImplementedError

    def extra_over_written(self, program: Program) -> int | None:
        """Bytes above the peak as written, where they do not depend on that peak; ``None`` if they do, or have no bound."""
        return None

    @staticmethod
    def parse(value: Budget | str | int | float | None) -> Budget:
        """Read a budget as users write it; ``None`` is the default, ``fsdp2``.

        Raises:
            OptionError: no budget, or one of zero or fewer bytes; the message names ``memory_budget``.

        >>> Budget.parse("+2GiB").resolve(program=None, as_written_peak_bytes=10 * 2**30) == 12 * 2**30
        True
        """
        if value is None:
            return Fsdp2()
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return _from_text(value.strip())
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OptionError(f"{_OPTION}={value!r} is no budget: {_ACCEPTED}")
        if not math.isfinite(value) or value != int(value):
            raise OptionError(f"{_OPTION}={value!r} is no whole number of bytes: {_ACCEPTED}")
        return Absolute(_positive(int(value), value))


def _from_text(text: str) -> Budget:
    if text.lower() == "unlimited":
        return Unlimited()
    if text.lower() == "fsdp2":
        return Fsdp2()
    if match := _FACTOR.fullmatch(text):
        return Factor(_positive(float(match[1]), text))
    try:
        if match := _FSDP2.fullmatch(text):
            return Fsdp2(parse_bytes(match[1], option=_OPTION))
        if text.startswith("+"):
            return Extra(parse_bytes(text[1:], option=_OPTION))
        size_bytes = parse_bytes(text, option=_OPTION)
    except OptionError as error:
        raise OptionError(f"{_OPTION}={text!r} is no budget: {_ACCEPTED}") from error
    return Absolute(_positive(size_bytes, text))


def _positive(number: _Number, written: object) -> _Number:
    if number <= 0:
        raise OptionError(f"{_OPTION}={written!r} leaves no memory: {_ACCEPTED}")
    return number


def _spell(size_bytes: int) -> str:
    """The largest unit that says it exactly: ``60GiB``, ``1536MiB``, ``1001B``."""
    unit, scale = next((unit, scale) for unit, scale in _UNITS if size_bytes % scale == 0)
    return f"{size_bytes // scale}{unit}" if size_bytes else "0B"


@dataclass(frozen=True, slots=True)
class Unlimited(Budget):
    """No bound."""

    @property
    def spec(self) -> str:
        return "unlimited"

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class Absolute(Budget):
    """So many bytes, whatever the graph."""

    size_bytes: int

    @property
    def spec(self) -> str:
        return _spell(self.size_bytes)

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return self.size_bytes


@dataclass(frozen=True, slots=True)
class Extra(Budget):
    """So many bytes above the peak of the order as written; ``+0B`` allows any order with no higher peak."""

    extra_bytes: int

    @property
    def spec(self) -> str:
        return f"+{_spell(self.extra_bytes)}"

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return as_written_peak_bytes + self.extra_bytes

    def extra_over_written(self, program: Program) -> int | None:
        return self.extra_bytes


@dataclass(frozen=True, slots=True)
class Factor(Budget):
    """A multiple of the peak of the order as written, rounded down."""

    factor: float

    @property
    def spec(self) -> str:
        return f"{Decimal(repr(self.factor)):f}x"

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return int(as_written_peak_bytes * self.factor)


@dataclass(frozen=True)
class Beside(Budget):
    """Another budget, for a graph that comes behind another, as the backward of a step does: the process holds what only the
    forward reads (:func:`overlap_pass.memory.ledger.resident_bytes`) and what was shared for it, and the CPU has run ahead.

    Attributes:
        staged_bytes: what would have been shared for it if no parameter lay there itself; what is beyond counts against the
            budget, as the order as written would not need it.
    """

    budget: Budget
    resident_bytes: int
    cpu_ahead_us: float = 0.0
    shared_bytes: int = 0
    staged_bytes: int = 0

    @property
    def spec(self) -> str:
        return self.budget.spec

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return self.budget.resolve(program, as_written_peak_bytes - self._spent_bytes(program))

    def extra_over_written(self, program: Program) -> int | None:
        extra_bytes = self.budget.extra_over_written(program)
        return None if extra_bytes is None else extra_bytes - self._spent_bytes(program)

    def _spent_bytes(self, program: Program) -> int:
        """What the forward has taken of the budget for good, to let parameters lie in shared memory."""
        shared, staged = (replace(program, shared_bytes=size) for size in (self.shared_bytes, self.staged_bytes))
        return staging_bytes(shared) - staging_bytes(staged)


@dataclass(frozen=True, slots=True)
class Fsdp2(Budget):
    """What eager FSDP2 holds above the order as written: two gathered units, the one in use and the one prefetched.

    The order as written gathers each parameter where it is needed; FSDP2 gathers a whole unit and, while that one
    computes, the next. Which two are alive together depends on the policy, so the two largest are taken. A unit is the
    parameter all-gathers with the same ``unit``; a gather of no known unit stands for itself.

    Attributes:
        extra_bytes: allowed above that.
    """

    extra_bytes: int = 0

    @property
    def spec(self) -> str:
        return f"fsdp2+{_spell(self.extra_bytes)}" if self.extra_bytes else "fsdp2"

    def resolve(self, program: Program, as_written_peak_bytes: int) -> int | None:
        return as_written_peak_bytes + self.extra_over_written(program)

    def extra_over_written(self, program: Program) -> int:
        gathered_bytes: Counter[str] = Counter()
        for op in program.launches:
            collective = op.collective
            if collective is None or collective.kind is not CollectiveKind.ALL_GATHER:
                continue
            if collective.role is Role.PARAMETER:
                key = f"launch {op.name}" if collective.unit is None else f"unit {collective.unit}"
                gathered_bytes[key] += collective.payload_bytes
        units_bytes = sum(size_bytes for _, size_bytes in gathered_bytes.most_common(2))
        return units_bytes + self.extra_bytes
