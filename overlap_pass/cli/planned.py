"""What ``plan``, ``sweep`` and ``strategies`` share: which model, on what, within how much memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_pass.errors import OptionError

if TYPE_CHECKING:
    from overlap_pass.config import Config
    from overlap_pass.graph.program import Program
    from overlap_pass.memory.budget import Budget

__all__ = ["add_model", "add_output", "add_reshard", "check_output", "config_of", "traced"]


def add_model(parser: argparse.ArgumentParser) -> None:
    """``--model``, ``--gpu`` and the options of the backend that matter to a plan."""
    parser.add_argument(
        "--model",
        default="llama3-8b",
        metavar="MODEL",
        help="a preset (bench-1b, bench-2b, llama3-8b), package.module:build or file.py:build (%(default)s)",
    )
    parser.add_argument(
        "--gpu", "--hardware", default="h100", metavar="NAME", help="hardware name or TOML file (%(default)s)"
    )
    parser.add_argument("--strategy", metavar="SPEC", help="strategy spec, such as 'latest_start'")
    parser.add_argument(
        "--coalesce", metavar="SIZE", help="'auto', 'off' or bytes of a coalesced launch (kept if it fits)"
    )
    parser.add_argument(
        "--mode",
        metavar="MODE",
        help="a mode of torch.compile: with reduce-overhead the CPU replays recorded CUDA graphs",
    )


def add_reshard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--reshard",
        metavar="user|auto",
        help="with auto the budget decides which gathered parameters stay for backward",
    )


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help=what)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")


def config_of(
    args: argparse.Namespace, budget: str | None, *, strategy: str | None = None, **others: str | None
) -> Config:
    """The backend's options, checked; the hardware is the machine as ``--mode`` launches on it (torch knows the modes)."""
    from overlap_pass.config import Config

    options = {
        "strategy": strategy,
        "memory_budget": budget,
        "hardware": args.gpu,
        "coalesce": args.coalesce,
        "mode": args.mode,
        **others,
    }
    config = Config.from_options(options)
    if args.mode is None:
        return config
    from overlap_pass.profiling.modes import launching

    return replace(config, hardware=launching(config.hardware_for(None), config.mode))


def check_output(path: Path | None, suffixes: Sequence[str], option: str = "--output") -> None:
    """Refuse a page that cannot be written before minutes are spent on it."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise OptionError(f"{option}={path} must end in {' or '.join(suffixes)}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{option}={path}: the folder {path.absolute().parent} does not exist")


def traced(
    model: str, world_size: int, tokens: int | None, config: Config, progress: Any
) -> tuple[tuple[Program, ...], Budget]:
    """Forward and backward of the model, and the budget to plan them within; imports torch."""
    from overlap_pass.profiling.target import build_of
    from overlap_pass.profiling.trace_plan import trace_model
    from overlap_pass.rewrite.partition import partition
    from overlap_pass.rewrite.reshard import PartitionByBudget
    from overlap_pass.transport.choice import Carriers

    auto = config.reshard == "auto"
    carriers = Carriers("nccl", "ring")  # other numbers of ranks are told from these, and copies stay within a box
    by_budget = PartitionByBudget(config.hardware_for(None), config.memory_budget, carriers) if auto else None
    programs: tuple[Program, ...] = trace_model(
        build_of(model, tokens=tokens), world_size=world_size, progress=progress.show, cut=by_budget or partition
    )
    return programs, config.memory_budget if by_budget is None else by_budget.budget
