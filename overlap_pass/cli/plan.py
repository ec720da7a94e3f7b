"""``overlap-pass plan``: what the schedule would give, for a model and a cluster that need not be there."""

from __future__ import annotations

import argparse
import math

from overlap_pass.cli.looks import colour, width
from overlap_pass.cli.mesh import mesh_of
from overlap_pass.cli.planned import add_model, add_output, add_reshard, check_output, config_of
from overlap_pass.errors import OptionError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="plan a model on a cluster that need not be there (no GPU needed)",
        description=(
            "Trace forward and backward of a model with a fake process group, plan both, and show the predicted step "
            "as written and as scheduled, with its memory and its distance from the bound."
        ),
    )
    add_model(parser)
    parser.add_argument("--world", type=int, metavar="N", help="ranks (8)")
    parser.add_argument(
        "--mesh",
        default="",
        metavar="SHAPE",
        help="2x4 for two replicas of four shards each (HSDP); default: all in one",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens per rank and step (presets: 8192)")
    parser.add_argument(
        "--budget",
        "--memory-budget",
        metavar="SIZE",
        help="bound on the peak: '60GiB', '+2GiB', '1.05x', 'fsdp2', 'unlimited'",
    )
    add_reshard(parser)
    parser.add_argument("--transport", metavar="nccl|copy_engine", help="copy_engine for groups within one box of GPUs")
    parser.add_argument(
        "--reduction", metavar="ring|exchange", help="with exchange gradients are sent as they are, summed on arrival"
    )
    parser.add_argument(
        "--final-places", metavar="auto|off", help="whether copies may put parameters where the peers fetch them from"
    )
    add_output(parser, "page to write: .html with both timelines, or .json")
    parser.set_defaults(run=run)


_CHOICES = ("reshard", "transport", "reduction", "final_places")


def run(args: argparse.Namespace) -> int:
    check_output(args.output, (".html", ".json"))
    config = config_of(args, args.budget, strategy=args.strategy, **{name: getattr(args, name) for name in _CHOICES})
    world = _world(args)
    if args.tokens is not None and args.tokens < 1:
        raise OptionError(f"--tokens={args.tokens} is too small: at least 1")
    from overlap_pass.cli.progress import Progress
    from overlap_pass.profiling.target import build_of
    from overlap_pass.profiling.trace_plan import plan_model
    from overlap_pass.report import jsonfile, terminal
    from overlap_pass.report.from_plans import write

    hardware = config.hardware_for(None)
    with Progress() as progress:
        comparison = plan_model(
            build_of(args.model, tokens=args.tokens),
            world_size=world,
            options={
                "strategy": config.strategy,
                "memory_budget": config.memory_budget,
                "hardware": hardware,
                "coalesce": config.coalesce,
                "mode": config.mode,
                **{name: getattr(config, name) for name in _CHOICES},
            },
            title=f"{args.model} on {args.mesh or world} × {hardware.name}",
            setting=_setting(args),
            progress=progress.show,
        )
    if args.output is not None:
        write(comparison, args.output)
    print(
        jsonfile.dumps(comparison).rstrip()
        if args.json
        else terminal.render(comparison, width=width(), colour=colour()).strip("\n")
    )
    return 0


def _world(args: argparse.Namespace) -> int | tuple[int, ...]:
    """Ranks, or the shape of their mesh."""
    mesh = mesh_of(args.mesh)
    if args.world is not None and mesh and math.prod(mesh) != args.world:
        raise OptionError(f"--mesh={args.mesh} has {math.prod(mesh)} places for --world={args.world} ranks")
    if mesh:
        return mesh
    return 8 if args.world is None else int(args.world)


def _setting(args: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    tokens = 8192 if args.tokens is None and ":" not in args.model else args.tokens
    named = () if tokens is None else (("tokens per rank", str(tokens)),)
    return (("model", f"{args.model}, forward + backward"), *named)
