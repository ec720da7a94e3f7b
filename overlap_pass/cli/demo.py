"""``overlap-pass demo``: on a CPU alone, see that the numbers stay and what the schedule would give on real GPUs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_pass.cli.looks import colour, width
from overlap_pass.cli.planned import check_output
from overlap_pass.errors import OptionError

if TYPE_CHECKING:
    from overlap_pass.cli.demo_training import TrainingReport
    from overlap_pass.cli.progress import Progress
    from overlap_pass.report.comparison import Comparison

__all__ = ["add_parser", "run"]

PLAN_OPTIONS = ("strategy", "memory_budget", "hardware")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small model with and without the backend, then plan a large one (no GPU needed)",
        description=(
            "Train a small Llama-style model on two CPU processes with eager FSDP2 and with the backend and compare "
            "losses and gradients bit for bit; then plan the same architecture at a real size for a cluster that "
            "need not be there, and write a page with both timelines."
        ),
    )
    parser.add_argument(
        "--model", default="bench-2b", metavar="NAME", help="model to plan: bench-1b, bench-2b, llama3-8b (%(default)s)"
    )
    parser.add_argument("--world", type=int, default=8, metavar="N", help="ranks to plan for (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens per rank and step (%(default)s)")
    parser.add_argument(
        "--hardware", "--gpu", default="h100", metavar="NAME", help="hardware name or TOML file (%(default)s)"
    )
    parser.add_argument("--strategy", metavar="SPEC", help="strategy spec, such as 'latest_start'")
    parser.add_argument(
        "--memory-budget", "--budget", metavar="SIZE", help="bound on the peak: '60GiB', '+2GiB', '1.05x', …"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("overlap-pass-demo.html"),
        metavar="FILE",
        help="page to write (%(default)s)",
    )
    parser.add_argument("--skip-training", action="store_true", help="only plan")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check(args)
    from overlap_pass.cli.progress import Progress
    from overlap_pass.report import html

    with Progress() as progress:
        training = None
        if not args.skip_training:
            from overlap_pass.cli.demo_training import compare_training

            progress.show("training: starting two ranks")
            training = compare_training(progress.show)
        comparison = _plan(args, progress)
    args.output.write_text(html.render(comparison), encoding="utf-8")
    print(_as_json(training, comparison) if args.json else _as_text(training, comparison, args.output))
    return 0 if training is None or training.equal else 1


def _check(args: argparse.Namespace) -> None:
    """Refuse bad input before minutes are spent on it."""
    from overlap_pass.config import Config

    for name, least in (("world", 2), ("tokens", 1)):
        if getattr(args, name) < least:
            raise OptionError(f"--{name}={getattr(args, name)} is too small: at least {least}")
    check_output(args.output, (".html",))
    Config.from_options(_options(args))
    from overlap_pass.profiling.llama import preset  # imports torch, so after everything that does not need it

    preset(args.model)


def _options(args: argparse.Namespace) -> dict[str, str]:
    """The backend options that were given; the others keep their defaults."""
    return {name: getattr(args, name) for name in PLAN_OPTIONS if getattr(args, name) is not None}


def _plan(args: argparse.Namespace, progress: Progress) -> Comparison:
    from overlap_pass.profiling.trace_plan import plan_llama

    comparison: Comparison = plan_llama(
        args.model,
        world_size=args.world,
        tokens=args.tokens,
        options=_options(args),
        progress=progress.show,
    )
    return comparison


def _as_json(training: TrainingReport | None, comparison: Comparison) -> str:
    from overlap_pass.report import jsonfile

    return json.dumps(
        {
            "training": None if training is None else training.to_json(),
            "comparison": json.loads(jsonfile.dumps(comparison)),
        },
        indent=2,
    )


def _as_text(training: TrainingReport | None, comparison: Comparison, page: Path) -> str:
    from overlap_pass.report import terminal

    table = terminal.render(comparison, width=width(), colour=colour()).strip("\n")
    return "\n\n".join([*([] if training is None else [_training_text(training)]), table, f"both timelines: {page}"])


def _training_text(training: TrainingReport) -> str:
    lines = ["small Llama on two gloo ranks, same seed:", "step  loss, eager FSDP2  loss, overlap"]
    rows = zip(training.losses_eager, training.losses_overlap, strict=True)
    lines += [f"{step:>4}  {eager:>17.9f}  {overlap:>13.9f}" for step, (eager, overlap) in enumerate(rows, start=1)]
    if training.equal:
        lines.append(f"losses and all {training.gradients} gradient shards are equal bit for bit")
    else:
        names = ", ".join(training.differing) or "none"
        lines.append(f"NOT EQUAL: compared {training.gradients} gradient shards; differing parameters: {names}")
    return "\n".join(lines)
