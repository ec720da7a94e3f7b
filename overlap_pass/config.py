"""The options of the backend, read once and checked: ``torch.compile(model, backend="overlap", options={...})``.

torch hands the mapping over as the user wrote it and checks nothing, so everything is refused here that would
otherwise be ignored in silence.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args

from overlap_pass.cost.hardware import Hardware, hardware_names, load_hardware
from overlap_pass.errors import HardwareError, OptionError
from overlap_pass.memory.budget import Budget
from overlap_pass.registry import parse, spec
from overlap_pass.schedule.launches import Launches, LaunchOrder
from overlap_pass.schedule.types import Strategy
from overlap_pass.spec import nearest
from overlap_pass.units import parse_bytes

__all__ = ["Config", "FinalPlaces", "FsdpMode", "Reduction", "Reshard", "Transport"]

_DEFAULT_HARDWARE = "h100"
_PAGES = (".html", ".json")

_ANSWERED = ("strategy", "coalesce", "launch_order", "communicators_in_flight", "final_places")
"""Options that a saved plan answers."""

Reshard = Literal["user", "auto"]
Transport = Literal["auto", "nccl", "copy_engine"]
Reduction = Literal["auto", "ring", "exchange"]
FinalPlaces = Literal["auto", "off"]
Verify = Literal["off", "first_steps"]


class FsdpMode(enum.StrEnum):
    """What happens to a ``fully_shard`` model whose collectives would not be in the graph."""

    AUTO = "auto"
    """It is made traceable in place, and one log line says so."""
    OFF = "off"
    """It is left alone: what the compiler sees of it is compiled, without its collectives."""
    ERROR = "error"
    """It is refused: call ``overlap_pass.make_traceable(model)`` first."""


@dataclass(frozen=True)
class Config:
    """What the user asked for; :meth:`from_options` reads it from the mapping given to ``torch.compile``.

    Attributes:
        strategy: how collectives are placed; a spec such as ``"latest_start{margin=1.25}"``.
        memory_budget: bound on the peak of the schedule: ``"60GiB"``, ``"+2GiB"``, ``"1.05x"``, ``"fsdp2"``,
            ``"fsdp2+2GiB"``, ``"unlimited"``.
        hardware: what the cost model prices for: a name or the path of a TOML file; ``None`` (``"auto"``) for the
            device that the model is on, see :meth:`hardware_for`.
        report: an ``.html`` or ``.json`` file to write the before/after report to, ``None`` for none.
        fsdp: see :class:`FsdpMode`.
        coalesce: whether neighbouring launches of one FSDP unit become one: ``"auto"`` (if it is predicted to pay),
            ``"off"``, or the bytes that a coalesced launch carries at least, which is kept if it fits the budget.
        transport: who carries parameters and gradients: ``"nccl"``, ``"copy_engine"``, or copy engines where they can
            (``"auto"``).
        reduction: how gradients are reduced: by the communicator (``"ring"``), or sent as they are and summed in
            float32 where they arrive (``"exchange"``); ``"auto"`` exchanges where that gives the same bits.
        final_places: whether gathers by copy put parameters where the peers fetch them from: if that is predicted to pay and
            fits the budget (``"auto"``), or ``"off"``.
        launch_order: how launches are ordered: the same on ranks whose graphs differ in compute (``"agreed"``), or by each
            rank's own prices (``"priced"``), which needs graphs of the same sizes on all ranks; ``"free"`` is that with
            collectives of activations that may change places with each other.
        communicators_in_flight: so many communicators at most have launches that are not waited for; ``None`` for no limit.
        pure_namespaces: namespaces of custom operators that do what their schema says and nothing else.
        plan: folder of plans that are run as they were saved, in place of planning; ``None`` to plan.
        save_plan: folder to save the plans to, ``None`` for none.
        reshard: which gathered parameters stay from forward to backward: those that the ``"user"`` said, or as many as
            the budget allows (``"auto"``).
        verify: ``"first_steps"`` runs both orders in the first steps and goes on with the faster one.
        mode: one of ``torch.compile``'s modes, for Inductor: torch takes no ``mode=`` beside ``options=``.
    """

    strategy: Strategy = field(default_factory=lambda: parse("fill_gaps"))
    memory_budget: Budget = field(default_factory=lambda: Budget.parse(None))
    hardware: Hardware | None = None
    report: Path | None = None
    fsdp: FsdpMode = FsdpMode.AUTO
    coalesce: int | Literal["auto", "off"] = "auto"
    transport: Transport = "auto"
    reduction: Reduction = "auto"
    final_places: FinalPlaces = "auto"
    reshard: Reshard = "user"
    verify: Verify = "off"
    launch_order: LaunchOrder = "agreed"
    communicators_in_flight: int | None = None
    pure_namespaces: tuple[str, ...] = ()
    plan: Path | None = None
    save_plan: Path | None = None
    mode: str = "default"

    @property
    def needs_planning(self) -> bool:
        """Whether something is written of each plan, which a graph out of a compile cache does not have."""
        return self.report is not None or self.save_plan is not None

    @property
    def launches(self) -> Launches:
        return Launches(self.coalesce, self.launch_order, self.communicators_in_flight, self.final_places == "auto")

    @classmethod
    def from_options(cls, options: Mapping[str, Any] | None = None) -> Config:
        """Read and check the mapping; an option that is absent or ``None`` keeps its default.

        Raises:
            OptionError: an unknown option (with the nearest spelling), or a value that is not accepted.
        """
        given = dict(options or {})
        known = [option.name for option in fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(f"unknown option {name!r}: {nearest(str(name), known)}")
        config = cls(**{name: _READERS[name](value) for name, value in given.items() if value is not None})
        if config.plan is not None:
            _refuse_beside_plan(given)
        if config.communicators_in_flight is not None and config.launch_order != "agreed":
            raise OptionError(
                f"communicators_in_flight={config.communicators_in_flight} holds back launches in the order of all ranks, and "
                f"launch_order={config.launch_order!r} has no such order: leave one of the two out"
            )
        return config

    def hardware_for(self, device_name: str | None) -> Hardware:
        """The hardware to price for, given the name of the model's CUDA device (``None`` on a CPU: h100).

        Raises:
            HardwareError: no hardware was asked for, and none is known for the device.
        """
        if self.hardware is not None:
            return self.hardware
        if device_name is None:
            return load_hardware(_DEFAULT_HARDWARE)
        for name in hardware_names():
            if re.search(rf"\b{re.escape(name)}\b", device_name, re.IGNORECASE):
                return load_hardware(_as_connected(name))
        raise HardwareError(
            f"hardware='auto' knows no {device_name!r}: name the nearest of {', '.join(hardware_names())} or give the "
            "path of a .toml file"
        )

    def as_written(self) -> Config:
        """The same without any change to the order, to what carries collectives, or to what is kept; and no report."""
        return replace(
            self,
            strategy=parse("as_written"),
            coalesce="off",
            transport="nccl",
            reduction="ring",
            reshard="user",
            verify="off",
            report=None,
            plan=None,
            save_plan=None,
        )

    @property
    def in_effect(self) -> tuple[tuple[str, str], ...]:
        """Options that shape a plan, as they are in effect, for reports; those that a saved plan answers are left out."""
        answered = () if self.plan is None else _ANSWERED
        shaping = {"plan": self.plan, **self._shaping, "pure_namespaces": ", ".join(self.pure_namespaces) or None}
        return tuple(
            (name, str(value)) for name, value in shaping.items() if value is not None and name not in answered
        )

    @property
    def _shaping(self) -> dict[str, Any]:
        return {
            "strategy": spec(self.strategy),
            "memory_budget": self.memory_budget.spec,
            "fsdp": self.fsdp.value,
            "coalesce": self.coalesce,
            "transport": self.transport,
            "reduction": self.reduction,
            "final_places": self.final_places,
            "reshard": self.reshard,
            "launch_order": self.launch_order,
            "communicators_in_flight": self.communicators_in_flight,
            "pure_namespaces": self.pure_namespaces,
            "mode": self.mode,
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything that can change a plan, contents of the hardware file included; for cache keys."""
        content = {**self._shaping, "hardware": repr(self.hardware)}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _as_connected(name: str) -> str:
    """The file for GPUs that reach each other through host memory, where NCCL is told so and there is one."""
    staged = f"{name}-host-staged"
    return staged if os.environ.get("NCCL_P2P_DISABLE") == "1" and staged in hardware_names() else name


def _strategy(value: Any) -> Strategy:
    if isinstance(value, str):
        return parse(value)
    if callable(getattr(value, "schedule", None)) and not isinstance(value, type):
        made: Strategy = value
        return made
    raise OptionError(f"strategy={value!r} is neither a spec such as 'latest_start' nor a strategy")


def _hardware(value: Any) -> Hardware | None:
    if isinstance(value, Hardware):
        return value
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    return load_hardware(_path("hardware", value))


def _report(value: Any) -> Path:
    path = Path(_path("report", value))
    if path.suffix not in _PAGES:
        raise OptionError(f"report={str(value)!r} must end with {' or '.join(_PAGES)}")
    return path


def _path(option: str, value: Any) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    raise OptionError(f"{option}={value!r} is no text")


def _folder(option: str) -> Callable[[Any], Any]:
    return lambda value: Path(_path(option, value))


def _refuse_beside_plan(given: Mapping[str, Any]) -> None:
    """A saved plan says what these would say."""
    for name in (*_ANSWERED, "save_plan"):
        if given.get(name) is not None:
            raise OptionError(
                f"{name}={given[name]!r} has no effect on a saved plan: leave it out, or plan={given['plan']!r}"
            )


def _fsdp(value: Any) -> FsdpMode:
    try:
        return FsdpMode(value)
    except ValueError:
        raise OptionError(f"fsdp={value!r} is not accepted: {nearest(str(value), map(str, FsdpMode))}") from None


def _coalesce(value: Any) -> int | Literal["auto", "off"]:
    if value in ("auto", "off"):
        return cast(Literal["auto", "off"], value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise OptionError(f"coalesce={value!r} is neither 'auto', 'off' nor a size such as '64MiB'")
    size_bytes = parse_bytes(value, option="coalesce") if isinstance(value, str) else value
    if size_bytes <= 0:
        raise OptionError(f"coalesce={value!r} is too small: write 'off' for no coalesced launches")
    return size_bytes


def _communicators(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(
            f"communicators_in_flight={value!r} is not accepted: a whole number from 1 on, or None for no limit"
        )
    return value


def _namespaces(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"pure_namespaces={value!r} is no list of namespaces: write ['mylib']")
    names = tuple(value)
    for name in names:
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(f"pure_namespaces: {name!r} is no namespace; of 'mylib::fused_norm' write 'mylib'")
    return tuple(sorted(set(names)))


def _one_of(option: str, accepted: tuple[str, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> str:
        if value not in accepted:
            raise OptionError(f"{option}={value!r} is not accepted: {nearest(str(value), accepted)}")
        return cast(str, value)

    return read


def _mode(value: Any) -> str:
    # Which ones there are, torch knows: the backend asks it.
    if not isinstance(value, str):
        raise OptionError(f"mode={value!r} is no text: write 'reduce-overhead'")
    return value


_READERS: dict[str, Callable[[Any], Any]] = {
    "strategy": _strategy,
    "memory_budget": Budget.parse,
    "hardware": _hardware,
    "report": _report,
    "fsdp": _fsdp,
    "coalesce": _coalesce,
    "transport": _one_of("transport", get_args(Transport)),
    "reduction": _one_of("reduction", get_args(Reduction)),
    "final_places": _one_of("final_places", get_args(FinalPlaces)),
    "reshard": _one_of("reshard", get_args(Reshard)),
    "verify": _one_of("verify", get_args(Verify)),
    "launch_order": _one_of("launch_order", get_args(LaunchOrder)),
    "communicators_in_flight": _communicators,
    "pure_namespaces": _namespaces,
    "mode": _mode,
    "plan": _folder("plan"),
    "save_plan": _folder("save_plan"),
}
