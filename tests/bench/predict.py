"""What the plans promise for machines that are not at hand, to be committed before somebody runs them there.

    python -m tests.bench.predict --world 8 --record docs/results/predicted-8-h200.json

The cases are those of ``tests.bench.h200``, ours alone: the 2 B Llama at 1024 and 4096 tokens a rank, with all ranks as one
group and with two replicas, and Llama-3-8B. Everything runs on a CPU. Prints a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from overlap_pass.profiling.trace_plan import llama_step, plan_model
from overlap_pass.units import ns_to_us

SCHEMA = "overlap-pass/predicted/1"
OPTIONS = {"mode": "reduce-overhead", "transport": "copy_engine"}
"""As on GPUs of one box, where copies are what is chosen by itself."""


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    tokens: int
    replicas: int = 1


CASES = (Case("bench-2b", 1024), Case("bench-2b", 4096), Case("bench-2b", 4096, replicas=2), Case("llama3-8b", 4096))


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of one step, forward and backward.

    Attributes:
        exposed_us: of collectives and of copies among GPUs.
        peak_bytes: as compiled code needs it; at most ``bound_bytes``, within ``budget_bytes``.
    """

    step_us: float
    compute_us: float
    exposed_us: float
    peak_bytes: int | None
    bound_bytes: int | None
    budget_bytes: int | None


def predict(case: Case, world: int, hardware: str) -> Predicted:
    comparison = plan_model(
        llama_step(case.model, case.tokens),
        world_size=(case.replicas, world // case.replicas) if case.replicas > 1 else world,
        options={**OPTIONS, "hardware": hardware},
    )
    side, figures = comparison.after, comparison.after.stats
    return Predicted(
        step_us=side.step_median_us,
        compute_us=ns_to_us(figures.compute_ns),
        exposed_us=ns_to_us(figures.exposed_ns + figures.exposed_copy_ns),
        peak_bytes=side.compiled_peak_bytes,
        bound_bytes=side.peak_bytes,
        budget_bytes=comparison.budget_bytes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8, help="ranks, in one box (%(default)s)")
    parser.add_argument("--hardware", default="h200")
    parser.add_argument("--record", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    found = [(case, predict(case, args.world, args.hardware)) for case in CASES]
    print(table(found))
    if args.record is not None:
        cases = [{"case": asdict(case), "predicted": asdict(of)} for case, of in found]
        args.record.write_text(json.dumps({**_about(args), "cases": cases}, indent=1) + "\n", encoding="utf-8")
    return 0


def _about(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "command": f"python -m tests.bench.predict --world {args.world} --hardware {args.hardware}",
        "options": OPTIONS,
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def table(found: Sequence[tuple[Case, Predicted]]) -> str:
    lines = ["| model | tokens a rank | replicas | step, ms | exposed, ms | peak, GiB |", "| --- " * 6 + "|"]
    for case, of in found:
        figures = f"{of.step_us / 1e3:.1f} | {of.exposed_us / 1e3:.1f} | {(of.peak_bytes or 0) / 2**30:.1f}"
        lines.append(f"| {case.model} | {case.tokens} | {case.replicas} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
