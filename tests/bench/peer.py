"""Our orders beside those of torch's own pass, on recorded graphs: ``python -m tests.bench.peer [NAME ...]``.

Same collectives (or ours joined, priced by the recorded curves), same prices, same simulator rules (one compute lane, one lane
a communicator, no contention). Ours is allowed the peer's memory, as a multiple of that of the order as written. Ours is simulated
twice: a collective starts behind everything issued before it, as on a CUDA device, or as soon as its input
exists, as in the recorder's simulator; the peer's figures are of the latter. *As good* is after how many seconds of our planning
an order within the memory allowed was first no slower than the peer's, by its rules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from overlap_pass.graph.dag import build_dag
from overlap_pass.memory.ledger import peak
from overlap_pass.planning import bound_of
from overlap_pass.registry import parse
from overlap_pass.schedule.types import Problem, Schedule, Strategy
from overlap_pass.simulate.bound import lower_bound
from overlap_pass.simulate.engine import simulate
from tests.bench.columns import gap, line, ms, seconds
from tests.bench.graphs import Recorded, files, read
from tests.bench.ours import priced

_HEADINGS = (
    "graph",
    "order",
    "step ms",
    "by data ms",
    "exposed ms",
    "peak / written",
    "gap %",
    "planning s",
    "as good s",
)
_EQUAL = 1e-4
"""Of a step, that is no difference: 0.01 %."""
_WIDTHS = (21, 24, 9, 11, 11, 15, 7, 11, 10)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of graph names; all graphs if none")
    parser.add_argument("--strategy", default="fill_gaps", help="strategy spec (%(default)s)")
    args = parser.parse_args(argv)
    if not files():
        print("no recorded graphs beside the checkout (../shared/graphs): nothing to compare with")
        return 0
    chosen = [path for path in files() if not args.names or any(name in path.name for name in args.names)]
    if not chosen:
        print(f"no recorded graph has {' or '.join(args.names)} in its name")
        return 1
    line(_HEADINGS, _WIDTHS)
    for path in chosen:
        for row in _rows(path, parse(args.strategy)):
            line(row, _WIDTHS)
    return 0


def _rows(path: Path, strategy: Strategy) -> Iterator[tuple[str, ...]]:
    recorded = read(path)
    program, costs, peer = recorded.program, recorded.costs, recorded.peer
    bound = lower_bound(build_dag(program), costs)
    written_bytes = peak(program).peak_bytes
    name = path.name.removesuffix(".json.gz")
    written = simulate(program, costs)
    above = gap(bound, written.step_us)
    yield name, "as written", ms(written.step_us), "", ms(written.exposed_us), "1.000", above, "", ""
    for label, step_us, ratio, planning_s in (
        ("torch", peer.step_us, peer.peak_ratio, seconds(peer.planning_s)),
        ("torch, no memory", peer.frugal_us, peer.frugal_peak_ratio, ""),
    ):
        yield name, label, "", ms(step_us), "", f"{ratio:.3f}", gap(bound, step_us), planning_s, ""
    for factor in sorted({1.0, round(peer.frugal_peak_ratio, 4), round(peer.peak_ratio, 4)}):
        allowed_bytes = max(int(written_bytes * factor), written_bytes)
        rival_us = peer.step_us if factor >= round(peer.peak_ratio, 4) else peer.frugal_us
        yield name, f"ours, ≤ {factor:.3f} ×", *_ours(recorded, strategy, allowed_bytes, rival_us, joined=False)
    bucketed = f"{peer.bucketed_peak_ratio:.3f}"
    yield name, "torch, best buckets", "", ms(peer.bucketed_us), "", bucketed, "", seconds(peer.bucketed_planning_s), ""
    for factor in sorted({1.05, round(max(peer.bucketed_peak_ratio, 1.0), 3)}):
        yield (
            name,
            f"ours, joined, ≤ {factor:.3f} ×",
            *_ours(recorded, strategy, int(written_bytes * factor), peer.bucketed_us, joined=True),
        )
    yield name, f"bound ({bound.by})", ms(bound.step_us), "", "", "", "", "", ""


class _Watched:
    """A strategy that notes when it gave which order."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy, self.name, self._began_s = strategy, strategy.name, time.process_time()
        self._given: list[tuple[float, Problem, Schedule]] = []

    def schedule(self, problem: Problem) -> Schedule:
        found = self._strategy.schedule(problem)
        self._given.append((time.process_time() - self._began_s, problem, found))
        return found

    def as_good_s(self, budget_bytes: int, rival_us: float) -> str:
        """When an order within the memory first took no longer than the rival's."""
        for given_s, problem, found in self._given:
            if peak(problem.program, found.order).peak_bytes <= budget_bytes:
                step_us = simulate(problem.program, problem.costs, found.order, launch_after="data").step_us
                if step_us <= rival_us * (1 + _EQUAL):
                    return seconds(given_s)
        return "never"


def _ours(
    recorded: Recorded, strategy: Strategy, budget_bytes: int, rival_us: float, *, joined: bool
) -> tuple[str, ...]:
    watched = _Watched(strategy)
    planned = priced(lambda: replace(recorded.program), recorded.priced, watched, budget_bytes, joined=joined)
    problem, order = planned.problem, planned.order
    simulated = simulate(problem.program, problem.costs, order)
    by_data_us = simulate(problem.program, problem.costs, order, launch_after="data").step_us
    ratio = peak(problem.program, order).peak_bytes / peak(recorded.program).peak_bytes
    return (
        ms(simulated.step_us),
        ms(by_data_us),
        ms(simulated.exposed_us),
        f"{ratio:.3f}",
        gap(bound_of(problem, order), simulated.step_us),
        seconds(planned.planning_s),
        watched.as_good_s(budget_bytes, rival_us),
    )


if __name__ == "__main__":
    raise SystemExit(main())
