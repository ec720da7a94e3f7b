"""Simulator, ledger and bound on real graphs that others simulated: optional, for a checkout with ``../shared/graphs``.

The graphs are recorded forward and backward graphs of Llama-3-8B and DeepSeek-v3 as neutral JSON, each with figures of an
independent simulator (one compute lane, one in-order lane a group, no contention) and an independent count of memory.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.cost.model import CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import (
    Category,
    Collective,
    CollectiveKind,
    OpKind,
    OpNode,
    Phase,
    Program,
    Role,
    Storage,
)
from overlap_pass.memory.ledger import peak
from overlap_pass.simulate.bound import lower_bound
from overlap_pass.simulate.engine import simulate
from tests.pure.programs import prices

_FOLDER = Path(__file__).parents[3] / "shared" / "graphs"
_FILES = sorted(_FOLDER.glob("*.json.gz"))

pytestmark = pytest.mark.skipif(not _FILES, reason="no recorded graphs beside the checkout")

_KINDS = {"placeholder": OpKind.INPUT, "compute": OpKind.COMPUTE, "view": OpKind.VIEW, "collective": OpKind.LAUNCH,
          "wait": OpKind.WAIT, "output": OpKind.OUTPUT}  # fmt: skip


def _read(path: Path) -> tuple[Program, CostTable, dict[str, Any]]:
    """The graph with its recorded durations; parameters (``primals``) are held, as in its own count of memory."""
    data = json.loads(gzip.decompress(path.read_bytes()))
    owner: dict[int, str] = {}
    launched: dict[str, str | None] = {}
    ops = []
    for node in data["nodes"]:
        ops.append(_op(node, launched))
        for storage in node["storages"]:
            owner.setdefault(storage, node["name"])
    held = {op.name for op in ops if op.kind is OpKind.INPUT and op.name.startswith("primals")}
    storages = tuple(Storage(n, size, owner[n], owner[n] in held) for n, size in enumerate(data["storage_bytes"]))
    program = Program(data["name"], Phase.BACKWARD, tuple(ops), storages)
    return program, prices(program, {node["name"]: node["duration_us"] for node in data["nodes"]}), data["reference"]


def _op(node: dict[str, Any], launched: dict[str, str | None]) -> OpNode:
    kind, name, inputs = _KINDS[node["kind"]], node["name"], tuple(dict.fromkeys(node["inputs"]))
    collective = None
    if kind is OpKind.LAUNCH:
        payload_bytes = max(node["bytes"], node["outputs_bytes"])
        collective = Collective(CollectiveKind.OTHER, node["group"], 2, payload_bytes, "", Role.PARAMETER)
    launched[name] = name if collective else next((launched[source] for source in inputs if launched[source]), None)
    launch = launched[name] if kind is OpKind.WAIT else None
    if kind is OpKind.WAIT and launch is None:  # waits for a collective of another graph
        kind = OpKind.COMPUTE
    if kind in (OpKind.WAIT, OpKind.COMPUTE):
        launched[name] = None
    return OpNode(
        name,
        kind,
        node["op"],
        inputs,
        tuple(node["storages"]),
        category=Category.OTHER,
        collective=collective,
        launch=launch,
    )


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_step_and_peak_as_written_are_those_of_an_independent_simulator(path: Path) -> None:
    program, costs, reference = _read(path)
    assert simulate(program, costs).step_us / 1e3 == pytest.approx(reference["before"]["sim_ms"], abs=1e-3)
    assert peak(program).peak_bytes / 2**30 == reference["alias_true_peak_gb"]["held_until_wait"]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_no_recorded_schedule_of_the_same_collectives_beats_the_bound_for_any_order(path: Path) -> None:
    program, costs, reference = _read(path)
    recorded_ms = [run["ms"] for run in reference["prototype"].values()]
    recorded_ms.append(reference["native_torch_2.13"]["r_reorder"]["sim_ms"])
    assert lower_bound(build_dag(program), costs, fixed=()).step_us / 1e3 <= min(recorded_ms) + 1e-3
