"""``overlap-pass sweep``: from how many tokens a rank on is communication hidden?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from overlap_pass.cli.looks import colour, width
from overlap_pass.cli.planned import add_model, add_output, add_reshard, check_output, config_of, traced
from overlap_pass.errors import InfeasibleBudget, OptionError

if TYPE_CHECKING:
    from overlap_pass.cli.progress import Progress
    from overlap_pass.config import Config
    from overlap_pass.graph.program import Program
    from overlap_pass.memory.budget import Budget
    from overlap_pass.planning import Plan
    from overlap_pass.report.sweep import Point, Sweep

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sweep",
        help="plan a model over tokens, ranks and budgets, and name where communication is hidden (no GPU needed)",
        description=(
            "Plan one model for every combination of tokens a rank, ranks and budgets, and draw the share of exposed "
            "communication. The model is traced once for each number of tokens; other numbers of ranks are rescaled. With "
            "--reshard auto every combination is traced, since what stays for the backward depends on it."
        ),
    )
    add_model(parser)
    parser.add_argument("--world", default="8", metavar="LIST", help="ranks, as a list: 8,64,256 (%(default)s)")
    parser.add_argument(
        "--tokens",
        default="1024,2048,4096,8192,16384",
        metavar="LIST",
        help="tokens per rank, as a list (%(default)s)",
    )
    parser.add_argument(
        "--budget",
        "--memory-budget",
        default="fsdp2",
        metavar="LIST",
        help="budgets, as a list: fsdp2,60GiB (%(default)s)",
    )
    add_reshard(parser)
    add_output(parser, "page to write: .html with the chart, or .json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    worlds, tokens = _numbers("world", args.world, 2), _numbers("tokens", args.tokens, 1)
    configs = [
        config_of(args, budget.strip(), strategy=args.strategy, reshard=args.reshard)
        for budget in args.budget.split(",")
    ]
    check_output(args.output, (".html", ".json"))
    from overlap_pass.cli.progress import Progress
    from overlap_pass.report import sweep_chart, sweep_table

    with Progress() as progress:
        sweep = _sweep(args.model, worlds, tokens, configs, progress)
    text = json.dumps(sweep.to_json(), indent=2)
    if args.output is not None:
        page = text + "\n" if args.output.suffix == ".json" else sweep_chart.render(sweep)
        args.output.write_text(page, encoding="utf-8")
    print(text if args.json else sweep_table.render(sweep, width=width(), colour=colour()).strip("\n"))
    return 0


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise OptionError(f"--{option}={text!r} is no list of whole numbers such as 1024,2048") from None
    if found[0] < least:
        raise OptionError(f"--{option}={text!r}: {found[0]} is too small: at least {least}")
    return found


def _sweep(
    model: str, worlds: tuple[int, ...], tokens: tuple[int, ...], configs: list[Config], progress: Progress
) -> Sweep:
    from overlap_pass.report.sweep import Sweep
    from overlap_pass.spec import spec

    points: list[Point] = []
    refused: list[tuple[str, str]] = []
    for count in tokens:
        traces = _Traces(model, worlds[0], count, progress)
        for world in worlds:
            for config in configs:
                what = f"{count} tokens, {world} ranks, {config.memory_budget.spec}"
                try:
                    programs, budget = traces.of(world, config)
                    progress.show(f"planning {what}")
                    found = _plans(programs, budget, config)
                except InfeasibleBudget as error:
                    refused.append((what, str(error)))
                else:
                    points.append(_point(found, count, world, config))
    hardware = configs[0].hardware_for(None).name
    setting = (
        ("model", f"{model}, forward + backward"),
        ("hardware", hardware),
        ("strategy", spec(configs[0].strategy)),
        ("coalesce", str(configs[0].coalesce)),
        ("reshard", configs[0].reshard),
        ("mode", configs[0].mode),
        ("traced at", f"{worlds[0]} ranks" if configs[0].reshard == "user" else "each number of ranks"),
    )
    return Sweep(f"{model} on {hardware}", setting, tuple(points), tuple(refused))


class _Traces:
    """Forward and backward for one number of tokens: traced once and rescaled, or, where that may change them, each anew."""

    def __init__(self, model: str, world: int, tokens: int, progress: Progress) -> None:
        self._model, self._world, self._tokens, self._progress = model, world, tokens, progress
        self._traced: tuple[Program, ...] = ()

    def of(self, world: int, config: Config) -> tuple[tuple[Program, ...], Budget]:
        """For so many ranks, and the budget to plan them within."""
        from overlap_pass.simulate.rescale import rescale

        if config.reshard == "auto":
            return traced(self._model, world, self._tokens, config, self._progress)
        if not self._traced:
            self._traced, _ = traced(self._model, self._world, self._tokens, config, self._progress)
        scaled = tuple(rescale(program, dict.fromkeys(program.groups, world)) for program in self._traced)
        return scaled, config.memory_budget


def _plans(programs: tuple[Program, ...], budget: Budget, config: Config) -> tuple[Plan, ...]:
    from overlap_pass.planning import plan_step

    return plan_step(programs, config.hardware_for(None), config.strategy, budget, launches=config.launches)


def _point(plans: tuple[Plan, ...], tokens: int, world: int, config: Config) -> Point:
    from overlap_pass.report.sweep import Point

    return Point(
        tokens=tokens,
        world_size=world,
        budget=config.memory_budget.spec,
        written_us=sum(plan.before.step_us for plan in plans),
        written_exposed_us=sum(plan.before.exposed_us for plan in plans),
        step_us=sum(plan.after.step_us for plan in plans),
        exposed_us=sum(plan.after.exposed_us for plan in plans),
        peak_bytes=max(plan.memory_after.peak_bytes for plan in plans),
        bound_us=sum(plan.bound.step_us for plan in plans),
    )
