"""``OVERLAP_PASS_DEBUG=1``: before a planned graph runs, do all ranks of its communicators mean to launch the same?

Ranks that launch in different orders hang, and a hang says nothing. With the variable set, a rank writes down what it is
about to launch before each run of a planned graph, and looks up what its neighbour in each of the graph's communicators has
written for the same run: a ring, so that one difference anywhere is seen by somebody. The side channel is the store of the
default process group, read without blocking and for a limited time; nothing is compared while a graph is compiled.

Runs are counted for each communicator. A rank that compiles another graph alone, for a batch of another shape say, is
therefore held against what the others run beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.fx as fx
from torch.distributed import distributed_c10d

from overlap_pass.errors import OptionError, RanksDiffer
from overlap_pass.graph.targets import group_of
from overlap_pass.schedule.skeleton import difference, hash_of

__all__ = ["Call", "communicators", "limit_s", "wanted", "with_roll_call"]

SWITCH, LIMIT = "OVERLAP_PASS_DEBUG", "OVERLAP_PASS_DEBUG_TIMEOUT_S"

_DEFAULT_LIMIT_S = 300.0
_LONGEST_NAP_S = 0.05
_KEPT_RUNS = 1024
"""A neighbour is never that many runs behind: what it has not read by then is deleted."""

_runs: dict[str, int] = {}
_published: set[str] = set()


@dataclass(frozen=True)
class Call:
    """What one graph is about to launch.

    Attributes:
        graph: its name, for messages.
        groups: names of the process groups it communicates on.
        lines: its launches, see ``schedule.skeleton``.
    """

    graph: str
    groups: tuple[str, ...]
    lines: tuple[str, ...]
    hash: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hash", hash_of(self.lines))


def wanted() -> bool:
    """Whether the variable is set, and there are ranks that could differ."""
    if os.environ.get(SWITCH, "0") in ("", "0"):
        return False
    return dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"


def communicators(graph: fx.Graph) -> tuple[str, ...]:
    """Names of the process groups that a graph communicates on, in order of first appearance."""
    names = (group_of(node) for node in graph.nodes if node.op == "call_function")
    return tuple(dict.fromkeys(name for name in names if name is not None))


def with_roll_call(run: Callable[[list[Any]], Any], call: Call) -> Callable[[list[Any]], Any]:
    """``run`` behind a comparison with the neighbours; boxed as it is."""

    def compared(arguments: list[Any]) -> Any:
        for group in call.groups:
            _compare(call, group)
        return run(arguments)

    compared._boxed_call = True  # type: ignore[attr-defined]
    return compared


def _compare(call: Call, group: str) -> None:
    """Write down this rank's launches and read the neighbour's.

    Raises:
        RanksDiffer: the neighbour is about to launch something else, or has not come in time.
    """
    store = dist.PrefixStore("overlap_pass", distributed_c10d._get_default_store())
    members = dist.get_process_group_ranks(distributed_c10d._resolve_process_group(group))
    me, run = dist.get_rank(), _runs.get(group, 0)
    _runs[group] = run + 1
    if call.hash not in _published:
        store.set(f"launches/{call.hash}", json.dumps(call.lines))
        _published.add(call.hash)
    store.set(f"{group}/{run}/{me}", call.hash)
    if run >= _KEPT_RUNS:
        store.delete_key(f"{group}/{run - _KEPT_RUNS}/{me}")
    neighbour = members[members.index(me) - 1]
    if neighbour == me:
        return
    theirs = _read(store, f"{group}/{run}/{neighbour}")
    where = f"run {run + 1} on communicator {group!r}, graph {call.graph!r}"
    if theirs is None:
        late = [rank for rank in members if not store.check([f"{group}/{run}/{rank}"])]
        raise RanksDiffer(
            f"{where}: rank {me} has waited {limit_s():g} s for rank {neighbour}. Not there yet: "
            f"{', '.join(map(str, late))} of {len(members)} ranks. They run fewer graphs, still compile, or have ended; "
            f"{LIMIT} sets how long to wait"
        )
    if theirs != call.hash:
        lines: Sequence[str] = json.loads(store.get(f"launches/{theirs}"))
        shown = difference({f"rank {me}": call.lines, f"rank {neighbour}": lines})
        raise RanksDiffer(
            f"{where}: ranks {me} and {neighbour} are about to launch in different orders, which would hang; {shown}\n"
            "Ranks must run the same modules with the same options and hardware; with launch_order='priced', or a budget "
            "that depends on the rank's own peak, also with inputs of the same shapes"
        )


def _read(store: Any, key: str) -> str | None:
    """The value once it is there, ``None`` if it does not come in time. Never blocks in the store, which others use too."""
    deadline = time.monotonic() + limit_s()
    for tries in itertools.count():
        if store.check([key]):
            return str(store.get(key).decode())
        if time.monotonic() > deadline:
            return None
        time.sleep(min(_LONGEST_NAP_S, 0.001 * 2 ** min(tries, 10)))
    return None


def limit_s() -> float:
    """How long a rank is waited for, and a step may take before it is called overdue.

    Raises:
        OptionError: what the environment says is no number of seconds above 0.
    """
    text = os.environ.get(LIMIT, "")
    try:
        seconds = float(text) if text else _DEFAULT_LIMIT_S
    except ValueError:
        seconds = -1.0
    if seconds <= 0:
        raise OptionError(f"{LIMIT}={text!r} is no number of seconds above 0")
    return seconds
