"""``OVERLAP_PASS_DEBUG=1``: where in its launches a planned graph is, so that a step that hangs can say it.

A mode sees every operator that compiled code or an FX graph calls, launches and waits among them, and on CUDA leaves an event
behind each wait: the host is far ahead there, and the last event that the GPU has passed says where it stands. When a graph
raises, its error carries the trail; when one is not through in time, a thread logs it. Nothing is ended: that stays with the
watchdog of the communicator and with the launcher.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overlap_pass.graph.targets import collective_kind, is_wait

__all__ = ["Trail", "report_overdue", "with_trail"]

_log = logging.getLogger("overlap_pass")

_LONGEST_NAP_S = 5.0


@dataclass(slots=True)
class _Wait:
    launch: int | None
    behind: torch.cuda.Event | None = None


@dataclass(eq=False)
class Trail:
    """How far one run of a graph has come.

    Attributes:
        graph: its name.
        lines: its launches, see ``schedule.skeleton``.
        launched: how many the host has launched.
        inside: the wait or launch that the host is in, in words.
        waits: those that the host has passed.
    """

    graph: str
    lines: Sequence[str]
    launched: int = 0
    inside: str | None = None
    waits: list[_Wait] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    returned: bool = False
    reported: bool = False
    _owners: dict[int, int] = field(default_factory=dict)

    def launch(self, call: Callable[[], Any]) -> Any:
        number = self.launched
        self.launched += 1
        self.inside = f"the launch of {self._line(number)}"
        result = call()
        self._owners.update((tensor.untyped_storage()._cdata, number) for tensor in _tensors(result))
        self.inside = None
        return result

    def wait(self, call: Callable[[], Any], arguments: Sequence[Any]) -> Any:
        owners = (self._owners.get(tensor.untyped_storage()._cdata) for tensor in _tensors(arguments))
        number = next((owner for owner in owners if owner is not None), None)
        self.inside = f"the wait for {self._line(number)}"
        result = call()
        self.inside = None
        self.waits.append(_Wait(number, _event(_tensors(result))))
        return result

    def through(self) -> bool:
        """Whether the host has returned and the GPU has passed the last wait."""
        last = self.waits[-1].behind if self.waits else None
        return self.returned and (last is None or last.query())

    def __str__(self) -> str:
        passed = sum(wait.behind is None or wait.behind.query() for wait in self.waits)
        launched = f"launched {self.launched} of {len(self.lines)}"
        if self.launched:
            launched += f", last {self._line(self.launched - 1)}"
        if self.launched < len(self.lines):
            launched += f"; next {self._line(self.launched)}"
        waited = f"{passed} of {len(self.waits)} waits passed" if passed < len(self.waits) else f"{passed} waits passed"
        if passed:
            waited += f", last for {self._line(self.waits[passed - 1].launch)}"
        if passed < len(self.waits):
            waited += f"; the GPU is at the one for {self._line(self.waits[passed].launch)}"
        if self.inside is not None:
            waited += f"; the host is in {self.inside}"
        return f"graph {self.graph!r}: {launched}\n  {waited}"

    def _line(self, number: int | None) -> str:
        if number is None:
            return "a collective of another graph"
        return f"#{number + 1} ({self.lines[number]})" if number < len(self.lines) else f"#{number + 1} (not planned)"


class _Watching(TorchDispatchMode):
    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self._trail = trail

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def call() -> Any:
            return func(*args, **(kwargs or {}))

        if collective_kind(func) is not None:
            return self._trail.launch(call)
        return self._trail.wait(call, args) if is_wait(func) else call()


def with_trail(
    run: Callable[[list[Any]], Any], graph: str, lines: Sequence[str], limit_s: float
) -> Callable[[list[Any]], Any]:
    """``run``, watched: its errors say how far it came, and a run that takes more than ``limit_s`` is logged. Boxed as it is."""

    def watched(arguments: list[Any]) -> Any:
        trail = Trail(graph, lines)
        _watch(trail, limit_s)
        try:
            with _Watching(trail):
                return run(arguments)
        except Exception as error:
            error.add_note(f"{trail}")
            raise
        finally:
            trail.returned = True

    watched._boxed_call = True  # type: ignore[attr-defined]
    return watched


_under_way: list[Trail] = []
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def _watch(trail: Trail, limit_s: float) -> None:
    global _watcher
    with _lock:
        _under_way.append(trail)
        if _watcher is None:
            _watcher = threading.Thread(target=_look_after, args=(limit_s,), name="overlap_pass trail", daemon=True)
            _watcher.start()


def _look_after(limit_s: float) -> None:
    """Until nothing is under way any more."""
    global _watcher
    while True:
        time.sleep(min(_LONGEST_NAP_S, limit_s / 4))
        with _lock:
            _under_way[:] = [trail for trail in _under_way if not trail.through()]
            if not _under_way:
                _watcher = None
                return
            report_overdue(_under_way, limit_s, time.monotonic())


def report_overdue(trails: Sequence[Trail], limit_s: float, now_s: float) -> None:
    """Log, once each, the trails of runs that have not come through within ``limit_s``."""
    for trail in trails:
        if not trail.reported and now_s - trail.started_s > limit_s:
            trail.reported = True
            _log.error("not through after %.0f s: %s", now_s - trail.started_s, trail)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _event(tensors: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
    if not any(tensor.is_cuda for tensor in tensors) or torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
