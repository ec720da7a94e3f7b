"""Our plans beside torch's own pass, on graphs traced here: ``python -m tests.bench.peer_live [NAME ...]``.

Both sides see the same graph and the same prices, are simulated by the same simulator and counted by the same ledger, and
their planning is timed in the same run: CPU seconds, medians of runs that alternate. torch's are those of its pass; ours
begin at the FX graph, so reading and pricing it are in them.

Each order is simulated twice: by the rules of a CUDA device (*step*: a collective starts behind everything issued before
it, and slows compute down), and by those that torch's pass believes in (*plain*: it starts as soon as its input exists, and slows
nobody down).

Rows. *torch, no memory* and *allowance*: its order, launches as they are, without and with what it may add to the memory of the
order as written; *told*: compute hides only as much as contention leaves of it, by the pass's multiplier. The others are with
buckets, whose copies are priced as any other op. *ours* has the memory of the torch row before it, which is the fastest of its
settings and timed several times (that of the order as written, where the pass failed); *for plain* is planned for the plain
prices, without contention. Both sides plan for this rank's prices, so ranks need not launch alike, which torch's pass gets by a
collective while it compiles and ours by agreement beforehand: the last row, our default (in memory, too).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.graph.dag import build_dag
from overlap_pass.graph.program import Program
from overlap_pass.memory.ledger import peak
from overlap_pass.registry import parse
from overlap_pass.schedule.types import Problem, Strategy
from overlap_pass.schedule.verify import violations
from overlap_pass.simulate.bound import lower_bound
from overlap_pass.simulate.engine import simulate
from tests.bench import ours
from tests.bench.columns import line, ms
from tests.bench.torch_pass import ORDER_ONLY, torch_pass
from tests.bench.traced import MODELS, PHASES, Traced, traced

SCHEMA = "overlap-pass/peer-live/1"
_HEADINGS = (
    "graph",
    "order",
    "launches",
    "step ms",
    "plain ms",
    "exposed ms",
    "peak / written",
    "gap %",
    "planning s",
    "reading",
)
_WIDTHS = (17, 36, 9, 9, 9, 11, 15, 7, 11, 8)
_NO_MEMORY: Mapping[str, Any] = {"max_memory_increase_gb": 0.0, "max_memory_increase_ratio": 0.0}
_BUCKETS: Mapping[str, Mapping[str, Any]] = {
    "pre-buckets": {},
    "both buckets": {"collective_bucketing": True},
    "own buckets": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": False},
    "pre-buckets of 128 MB": {"pre_bucketing_fsdp_collectives_bucket_cap_mb": 128.0},
}


@dataclass(frozen=True, slots=True)
class Row:
    """One order of one graph.

    Attributes:
        step_us: on a CUDA device with the hardware file's contention.
        plain_us: without contention, collectives free to start as soon as their input exists.
        gap_percent: of ``step_us`` above what no order of these launches and of compute goes below.
        planning_s: CPU seconds, the median where there are several runs; ``None`` where nothing was planned.
        reading_s: of those, for reading the FX graph, which the pass works on as it is.
        problem: what the pass failed with; then there are no figures.
    """

    graph: str
    order: str
    launches: int = 0
    step_us: float = 0.0
    plain_us: float = 0.0
    exposed_us: float = 0.0
    peak_bytes: int = 0
    peak_ratio: float = 0.0
    gap_percent: float = 0.0
    planning_s: float | None = None
    reading_s: float | None = None
    problem: str = ""

    def cells(self) -> tuple[str, ...]:
        if self.problem:
            return (self.graph, f"{self.order}: {self.problem}", *[""] * (len(_HEADINGS) - 2))
        times = ("" if time_s is None else f"{time_s:.2f}" for time_s in (self.planning_s, self.reading_s))
        return (
            self.graph, self.order, str(self.launches), ms(self.step_us), ms(self.plain_us), ms(self.exposed_us),
            f"{self.peak_ratio:.4f}", f"{self.gap_percent:.1f}", *times,
        )  # fmt: skip


class Bench:
    """The rows of one graph."""

    def __init__(self, graph: Traced, strategy: Strategy, runs: int) -> None:
        self._graph, self._strategy, self._runs = graph, strategy, runs
        self._written = Problem(build_dag(graph.program), graph.price(graph.program), None)
        self._written_bytes = peak(graph.program).peak_bytes

    def rows(self) -> Iterator[Row]:
        """In the order of the table: as written, orders at equal launches, launches of each side's own, our default."""
        yield self._row("as written", self._written, self._graph.program.order)
        told = {"compute_overlap_multipler": _left_by_contention(self._graph.hardware.contention)}
        yield from self._against({"no memory": {**ORDER_ONLY, **_NO_MEMORY}}, joined=False)
        yield from self._against({"allowance": ORDER_ONLY, "told": {**ORDER_ONLY, **told}}, joined=False)
        yield from self._against({**_BUCKETS, "both buckets, told": {**_BUCKETS["both buckets"], **told}}, joined=True)
        yield self._planned("ours, agreed (default)", ours.agreed(self._graph.read, self._graph.price, self._strategy))

    def _against(self, settings: Mapping[str, Mapping[str, Any]], *, joined: bool) -> Iterator[Row]:
        """torch's orders, of which the one with the shortest step is told last, and ours within its memory."""
        tried = {label: self._torch(label, options) for label, options in settings.items()}
        done = {label: row for label, row in tried.items() if not row.problem}
        best = min(done, key=lambda label: done[label].step_us, default="")
        yield from (row for label, row in tried.items() if label != best)
        budget_bytes = max(done[best].peak_bytes if best else 0, self._written_bytes)
        theirs, mine = [], []
        for _ in range(self._runs):
            theirs += [self._torch(best, settings[best])] if best else []
            mine.append(self._ours(budget_bytes, joined=joined))
        yield from map(_median, filter(None, (theirs, mine)))
        yield self._ours(budget_bytes, joined=joined, plain=True)

    def _torch(self, label: str, options: Mapping[str, Any]) -> Row:
        try:
            passed = torch_pass(self._graph, options)
        except RuntimeError as error:
            return Row(
                self._graph.name, f"torch, {label}", problem=f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )
        problem = Problem(build_dag(passed.program), passed.costs, None)
        return replace(self._row(f"torch, {label}", problem, passed.order), planning_s=passed.planning_s)

    def _ours(self, budget_bytes: int, *, joined: bool, plain: bool = False) -> Row:
        def price(program: Program) -> CostTable:
            costs = self._graph.price(program)
            return _plain(costs) if plain else costs

        planned = ours.priced(self._graph.read, price, self._strategy, budget_bytes, joined=joined)
        label = f"ours{', joined' if joined else ''}{', for plain' if plain else ''}"
        return self._planned(f"{label}, ≤ {budget_bytes / self._written_bytes:.4f} ×", planned)

    def _planned(self, label: str, planned: ours.Planned) -> Row:
        program = planned.problem.program
        problem = Problem(planned.problem.dag, self._graph.price(program), None)
        found = self._row(label, problem, planned.order)
        return replace(found, planning_s=planned.planning_s, reading_s=planned.reading_s)

    def _row(self, label: str, problem: Problem, order: tuple[str, ...]) -> Row:
        program, costs = problem.program, problem.costs
        if broken := violations(replace(program, activations_free=True, launches_fixed=False), order):
            raise ValueError(f"{self._graph.name}, {label}: {broken[0]}")
        simulated = simulate(program, costs, order)
        peak_bytes = peak(program, order).peak_bytes
        return Row(
            graph=self._graph.name,
            order=label,
            launches=len(program.launches),
            step_us=simulated.step_us,
            plain_us=simulate(program, _plain(costs), order, launch_after="data").step_us,
            exposed_us=simulated.exposed_us,
            peak_bytes=peak_bytes,
            peak_ratio=peak_bytes / self._written_bytes,
            gap_percent=lower_bound(problem.dag, costs, fixed=()).gap_percent(simulated.step_us),
        )


def _median(runs: Sequence[Row]) -> Row:
    """One row of several runs, which differ in the time that planning took and in nothing else."""
    found = runs[0]
    for name in ("planning_s", "reading_s"):
        times_s = [time_s for row in runs if (time_s := getattr(row, name)) is not None]
        if times_s:
            found = replace(found, **{name: statistics.median(times_s)})
    return found


def _left_by_contention(contention: Contention) -> float:
    """What a collective gets done beside compute that takes a second by itself, in seconds of its own."""
    return contention.compute_beside_communication / contention.communication_beside_compute


def _plain(costs: CostTable) -> CostTable:
    """The prices alone: what the ops take, and nothing of what lanes and the CPU do to each other."""
    return replace(
        costs,
        contention=Contention(),
        beside_compute={},
        starts_between_kernels=False,
        launch_us=dict.fromkeys(costs.launch_us, 0.0),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names of graphs; all graphs if none")
    parser.add_argument("--strategy", default="fill_gaps", help="strategy spec (%(default)s)")
    parser.add_argument("--hardware", default="h100", help="hardware file or name (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each side (%(default)s)")
    parser.add_argument("--record", type=Path, help="JSON file that gets the rows; others in it are kept")
    args = parser.parse_args(argv)
    hardware, strategy = load_hardware(args.hardware), parse(args.strategy)
    parts = args.names or [""]
    chosen = {name: model for name, model in MODELS.items() if any(_asked(parts, name, phase) for phase in PHASES)}
    if not chosen:
        print(f"no graph has {' or '.join(parts)} in its name; there are {', '.join(MODELS)}, each with _fw and _bw")
        return 1
    line(_HEADINGS, _WIDTHS)
    for name, model in chosen.items():
        with traced(name, model, hardware) as graphs:
            for graph in (one for one in graphs if any(part in one.name for part in parts)):
                rows = _printed(Bench(graph, strategy, args.runs).rows())
                if args.record is not None:
                    _record(args.record, rows, args)
    return 0


def _asked(parts: Sequence[str], name: str, phase: str) -> bool:
    return any(part in f"{name}_{phase}" for part in parts)


def _printed(rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        line(row.cells(), _WIDTHS)
        found.append(row)
    return found


def _record(path: Path, rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Write the rows of a graph, in place of what the file had of it."""
    kept = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    known = {row.graph for row in rows}
    found = {
        "schema": SCHEMA,
        "command": "python -m tests.bench.peer_live",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "hardware": args.hardware,
        "strategy": args.strategy,
        "runs": args.runs,
        "processors": os.cpu_count(),
        "rows": [row for row in kept if row["graph"] not in known] + [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
