"""Our entry points as the shared scenarios want them.

The scenarios (``../shared/scenarios`` beside the checkout) know no product: they hand over a graph, a list of events or the
number of a rank. Each of these doors is opened onto ours here, and every order that comes out is also shown to the
scenarios' own oracle of legality.
"""

from __future__ import annotations

import copy
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
import torch.fx as fx

from compile_backends import eager
from compile_backends.compilation import Compilation
from overlap_pass.config import Config
from overlap_pass.cost.contention import Contention
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import CostTable
from overlap_pass.graph.program import Phase, Program, Role
from overlap_pass.graph.read import phase_of, read_program
from overlap_pass.memory.budget import Budget
from overlap_pass.memory.ledger import peak
from overlap_pass.planning import make_plan
from overlap_pass.registry import parse
from overlap_pass.rewrite.reorder import reorder
from overlap_pass.schedule.launches import Launches
from overlap_pass.simulate.engine import simulate
from overlap_pass.timeline.stats import measure
from overlap_pass.traces.capture import read_trace, whole
from tests.cpu.test_backend_numerics import SLOW, watched_plans

FOLDER = Path(__file__).parents[3] / "shared" / "scenarios"

BY_PRICE = Launches("off", "priced")
Seen = list[tuple[str, list[str], list[str], fx.GraphModule]]


def load(name: str) -> ModuleType:
    """``open_cpu`` or ``common`` of the scenarios."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


# -- graphs


def schedule(gm: fx.GraphModule, budget: str = "fsdp2", strategy: str = "latest_start") -> fx.GraphModule:
    """What the backend does to one graph: plan it for H100 and put its nodes into the planned order.

    Every launch stays by itself, as the oracle tells launches by their names.
    """
    before = copy.deepcopy(gm)
    program = _read(gm)
    plan = make_plan(program, load_hardware("h100"), parse(strategy), Budget.parse(budget), launches=Launches("off"))
    reorder(gm.graph, plan.schedule.order)
    gm.recompile()
    assert illegal(before, gm, program) == []
    return gm


def for_any_rank(rank: int) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A rank's own measurements have no way in: every rank is planned for the same hardware file."""
    return schedule


def within_extra_bytes(gm: fx.GraphModule, extra_bytes: int | None) -> fx.GraphModule:
    return schedule(gm, "unlimited" if extra_bytes is None else f"+{extra_bytes}B")


def within_window(gm: fx.GraphModule, gathers: int) -> fx.GraphModule:
    return schedule(gm, "unlimited", f"backward_pre{{depth={gathers}}}")


def priced(cost_us: Callable[[fx.Node], float]) -> Callable[[fx.GraphModule, int], fx.GraphModule]:
    """The same with the scenario's own prices, on a device whose CPU is never late."""

    def within(gm: fx.GraphModule, extra_bytes: int) -> fx.GraphModule:
        program, measured = _read(gm), {node.name: cost_us(node) for node in gm.graph.nodes}
        budget = Budget.parse(f"+{extra_bytes}B")
        plan = make_plan(program, SLOW, parse("latest_start"), budget, launches=BY_PRICE, measured=measured)
        reorder(gm.graph, plan.schedule.order)
        return gm

    return within


def illegal(before: fx.GraphModule, after: fx.GraphModule, program: Program) -> list[Any]:
    """The oracle's findings without those that are no promise of ours.

    It wants all launches in their order as written. We promise that for collectives of activations and for opaque ops; a
    gather of a parameter may pass any other launch, and so may the reduction of a gradient (``program.Role``), in the
    same way on every rank.
    """
    free = {op.name for op in program.launches if op.collective.role is not Role.ACTIVATION}
    found = []
    for what, *details in load("common").illegal(before, after):
        if what == "comm order":
            written, now = ([name for name in names if name not in free] for names in details)
            if written == now and sorted(details[0]) == sorted(details[1]):
                continue
        found.append((what, *details))
    return found


def _read(gm: fx.GraphModule) -> Program:
    return read_program(gm.graph, phase_of(gm.graph))


# -- models


def backend_factory(seen: Seen) -> Callable[..., Any]:
    """The eager lowering, which also says what it saw."""

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compilation = _Watched.begin(gm, Config.from_options({"hardware": SLOW, "coalesce": "off"}))
        compilation.seen = seen
        return eager.lower(gm, example_inputs, compilation)

    return backend


@dataclass
class _Watched(Compilation):
    seen: Seen = field(default_factory=list)

    def schedule(self, graph: fx.Graph) -> None:
        gm = graph.owning_module
        before, program = copy.deepcopy(gm), _read(gm)
        super().schedule(graph)
        assert illegal(before, gm, program) == []
        summary = load("common").summary
        tag = "bw" if program.phase is Phase.BACKWARD else "fw"
        # A copy: what is lowered then names its gathers as gloo needs them.
        self.seen.append((tag, summary(before), summary(gm), copy.deepcopy(gm)))


def rank_part(name: str, *doors: Any) -> Any:
    """A scenario's part for this rank."""
    return getattr(load("open_cpu"), name)(dist.get_rank(), dist.get_world_size(), *doors)


def collectives_of_an_fsdp2_model(how: str) -> int:
    """S23 with our backend by name: how many collectives were planned."""
    scenarios = load("open_cpu")
    with pytest.MonkeyPatch.context() as patch, watched_plans() as plans:
        patch.setattr(scenarios, "mk_backend", lambda *_: "overlap_eager")
        scenarios.s23_rank(dist.get_rank(), dist.get_world_size(), how, False)
    return sum(plan.collectives for plan in plans)


def error_of_an_fsdp2_model() -> str:
    """S23 with our backend inside another function, where it cannot convert the model first."""
    scenarios = load("open_cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenarios, "mk_backend", lambda *_: _wrapped)
        try:
            scenarios.s23_rank(dist.get_rank(), dist.get_world_size(), "whole", False)
        except Exception as error:  # noqa: BLE001  whatever it is, the test reads it
            return f"{type(error).__name__}: {error}"
    return "no error"


def _wrapped(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from compile_backends.overlap import overlap_eager

    return overlap_eager(gm, example_inputs)


# -- estimates and measurements


def predicted_peak_bytes(gm: fx.GraphModule) -> int:
    """What the graph itself allocates; the scenarios do not count what the caller holds."""
    profile = peak(_read(gm))
    return profile.peak_bytes - profile.base_bytes


def simulated_us(gm: fx.GraphModule, cost_us: Callable[[fx.Node], float]) -> float:
    duration_us = {node.name: cost_us(node) for node in gm.graph.nodes}
    costs = CostTable(duration_us, launch_us=dict.fromkeys(duration_us, 0.0), contention=Contention())
    return simulate(_read(gm), costs).step_us


def measured_us(events: Sequence[tuple[str, int, float, float]]) -> tuple[float, float]:
    """Communication and exposed communication of a trace that holds just these events."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        path.write_text(json.dumps({"traceEvents": [_trace_event(*event) for event in events]}), encoding="utf-8")
        stats = measure(whole(read_trace(path)))
    return stats.communication_ns / 1000, stats.exposed_ns / 1000


def _trace_event(name: str, stream: int, start_us: float, end_us: float) -> Mapping[str, Any]:
    category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
    arguments = {"stream": stream, "device": 0}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start_us,
            "dur": end_us - start_us, "args": arguments}  # fmt: skip
