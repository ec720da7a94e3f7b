"""``overlap-pass strategies``: all strategies on one model, side by side."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from overlap_pass.cli.looks import colour, width
from overlap_pass.cli.planned import add_model, add_reshard, config_of, traced
from overlap_pass.errors import OptionError, OverlapPassError

if TYPE_CHECKING:
    from overlap_pass.cli.progress import Progress
    from overlap_pass.config import Config
    from overlap_pass.graph.program import Program
    from overlap_pass.memory.budget import Budget
    from overlap_pass.report.strategies_table import Row

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "strategies",
        help="compare all strategies on one model (no GPU needed)",
        description=(
            "Trace forward and backward of a model once and plan them with every strategy: simulated step, exposed "
            "communication, peak, gap to the bound, planning time. A strategy that cannot plan the model says why."
        ),
    )
    add_model(parser)
    parser.add_argument("--world", type=int, default=8, metavar="N", help="ranks (%(default)s)")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per rank and step (presets: 8192)")
    parser.add_argument(
        "--budget",
        "--memory-budget",
        metavar="SIZE",
        help="bound on the peak: '60GiB', '+2GiB', '1.05x', 'fsdp2', 'unlimited'",
    )
    add_reshard(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = config_of(args, args.budget, reshard=args.reshard)
    if args.tokens is not None and args.tokens < 1:
        raise OptionError(f"--tokens={args.tokens} is too small: at least 1")
    from overlap_pass.cli.progress import Progress
    from overlap_pass.registry import parse, registry
    from overlap_pass.report import strategies_table

    specs = registry().names if args.strategy is None else tuple(args.strategy.split(";"))
    for spec in specs:
        parse(spec)  # a name that is not known is said before minutes are spent on the others
    with Progress() as progress:
        programs, budget = traced(args.model, args.world, args.tokens, config, progress)
        rows = strategies_table.beside_one_bound([_row(text, config, programs, budget, progress) for text in specs])
    mode = "" if args.mode is None else f", mode {config.mode}"
    title = f"{args.model} on {args.world} × {config.hardware_for(None).name}{mode}"
    if args.json:
        print(json.dumps({"title": title, "strategies": [row.to_json() for row in rows]}, indent=2))
    else:
        print(strategies_table.render(title, rows, width=width(), colour=colour()).strip("\n"))
    return 0


def _row(text: str, config: Config, programs: tuple[Program, ...], budget: Budget, progress: Progress) -> Row:
    from overlap_pass.planning import plan_step
    from overlap_pass.registry import parse
    from overlap_pass.report.strategies_table import Row

    progress.show(f"planning with {text}")
    strategy: Any = parse(text)
    began_s = time.perf_counter()
    try:
        plans = plan_step(programs, config.hardware_for(None), strategy, budget, launches=config.launches)
    except OverlapPassError as error:
        return Row(text, planning_s=time.perf_counter() - began_s, refused=str(error))
    bound_us = sum(plan.bound.step_us for plan in plans)
    step_us = sum(plan.after.step_us for plan in plans)
    return Row(
        text,
        step_us=step_us,
        exposed_us=sum(plan.after.exposed_us for plan in plans),
        peak_bytes=max(plan.memory_after.peak_bytes for plan in plans),
        bound_us=bound_us,
        planning_s=time.perf_counter() - began_s,
    )
