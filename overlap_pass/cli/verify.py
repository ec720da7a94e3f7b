"""``overlap-pass verify``: before and after on the GPUs at hand, under torchrun."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_pass.cli.planned import check_output
from overlap_pass.errors import OptionError, PlanError

if TYPE_CHECKING:
    from overlap_pass.report.verification import Verification

__all__ = ["add_parser", "run"]

_OPTIONS = ("strategy", "memory_budget", "hardware")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="measure a step before and after on your GPUs (under torchrun)",
        description=(
            "Run the same training step under several systems in alternating blocks and compare step time, exposed "
            "communication, memory and numbers. Start it with: torchrun --nproc-per-node N -m overlap_pass verify "
            "train.py:make_step"
        ),
    )
    parser.add_argument("target", metavar="TARGET", help="file.py:function that returns (model, step, data)")
    parser.add_argument(
        "--against",
        metavar="LIST",
        default="as-written,fsdp2,fsdp2-compile",
        help=(
            "systems to compare with: as-written, fsdp2, fsdp2-compile, torch-overlap, torch-manual, compute-only "
            "(%(default)s)"
        ),
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="argument for the function")
    parser.add_argument("--strategy", metavar="SPEC", help="strategy spec, such as 'latest_start'")
    parser.add_argument(
        "--memory-budget", "--budget", metavar="SIZE", help="bound on the peak: '60GiB', '+2GiB', '1.05x', …"
    )
    parser.add_argument(
        "--hardware", "--gpu", metavar="NAME", help="hardware name or TOML file that costs are taken from"
    )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="any option of the backend")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="alternating blocks (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps in a block (%(default)s)")
    parser.add_argument(
        "--profiled", type=int, default=4, metavar="N", help="profiled steps of each system, 0 for none (%(default)s)"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="where there is no GPU, try the script on CPUs over gloo; times mean nothing then",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="page (.html) with the timelines of baseline and schedule"
    )
    parser.add_argument("--record", type=Path, metavar="FILE", help="JSON file for all figures")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from overlap_pass.config import Config
    from overlap_pass.profiling.ranks import ranks
    from overlap_pass.profiling.variants import baselines
    from overlap_pass.profiling.verify import Effort, require_cuda, verify
    from overlap_pass.profiling.workload import load_make_step

    against = baselines(args.against)
    make_step = load_make_step(args.target, _arguments("--set", args.set))
    named = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    options = {**named, **_arguments("--option", args.option)}
    Config.from_options(options)
    _check(args)
    if not args.rehearse:
        require_cuda()
    with ranks("verify") as (_, first):
        if first:
            _tell_progress()
        verification = verify(
            make_step,
            against=against,
            options=options,
            effort=Effort(rounds=args.rounds, steps=args.steps, profiled=args.profiled, rehearsal=args.rehearse),
        )
        if first:
            _write(verification, args)
    return 1 if verification.scheduled.wrong else 0


def _check(args: argparse.Namespace) -> None:
    """Refuse bad input before minutes are spent on it."""
    for name, least in (("rounds", 2), ("steps", 1), ("profiled", 0)):
        if getattr(args, name) < least:
            raise OptionError(f"--{name}={getattr(args, name)} is too small: at least {least}")
    check_output(args.output, (".html",))
    check_output(args.record, (".json",), "--record")
    if args.output is not None and args.profiled == 0:
        raise OptionError("--output needs timelines, and --profiled=0 takes none: leave one of them out")


def _arguments(switch: str, pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; a value that reads as JSON (number, true, "text") is that, else the text itself."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise OptionError(f"{switch} {pair!r} is no NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _tell_progress() -> None:
    import logging

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("verify: %(message)s"))
    logger = logging.getLogger("overlap_pass.verify")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _command(args: argparse.Namespace) -> str:
    """What to type to measure this again; where the results went is left out."""
    import shlex

    import torch.distributed as dist

    words = ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "-m", "overlap_pass", "verify", args.target]
    words += [word for pair in args.set for word in ("--set", pair)]
    words += [word for pair in args.option for word in ("--option", pair)]
    words += ["--against", args.against]
    for option in _OPTIONS:
        if getattr(args, option) is not None:
            words += [f"--{option.replace('_', '-')}", getattr(args, option)]
    for count in ("rounds", "steps", "profiled"):
        words += [f"--{count}", str(getattr(args, count))]
    words += ["--rehearse"] * args.rehearse
    return shlex.join(words)


def _write(verification: Verification, args: argparse.Namespace) -> None:
    import datetime
    from dataclasses import replace

    from overlap_pass.report import html, verification_text

    stamped = replace(
        verification,
        title=" ".join([args.target, *args.set]),
        setting=(
            *verification.setting,
            ("command", _command(args)),
            ("date", datetime.date.today().isoformat()),
        ),
    )
    if args.record is not None:
        args.record.write_text(json.dumps(stamped.to_json(), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(stamped.to_json(), indent=1) if args.json else verification_text.render(stamped), flush=True)
    if args.output is not None:
        try:
            args.output.write_text(html.render(stamped.comparison()), encoding="utf-8")
        except PlanError as error:
            print(f"verify: {args.output} was not written: {error}", file=sys.stderr)
