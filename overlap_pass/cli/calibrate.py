"""``overlap-pass calibrate``: the hardware file of the machine at hand (under torchrun), or of one that left a trace."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overlap_pass.cli.mesh import mesh_of
from overlap_pass.errors import HardwareError, OptionError

if TYPE_CHECKING:
    from overlap_pass.cost.calibration import Calibration
    from overlap_pass.cost.hardware import Hardware

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="measure your GPUs and links and write a hardware file (under torchrun)",
        description=(
            "Measure collectives by size, matrix products, memory, contention, launches and gathers by copy engine, and "
            "write the hardware file that plans take their costs from. Start it with: torchrun --nproc-per-node N -m "
            "overlap_pass calibrate --output mine.toml"
        ),
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="hardware file to write (.toml)")
    parser.add_argument(
        "--base", metavar="NAME", help="hardware name or file for what is not measured (default: by the GPU's name)"
    )
    parser.add_argument(
        "--mesh", default="", metavar="SHAPE", help="measure the groups of a device mesh too, such as 2x4"
    )
    parser.add_argument(
        "--from-trace", nargs="+", metavar="TRACE", help="fit to profiler traces instead: files, globs or folders"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="with --from-trace: GPUs that share the fast link (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print every measured time and the model's as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.output.suffix != ".toml" or not args.output.absolute().parent.is_dir():
        raise OptionError(f"--output={args.output} must be a .toml file in a folder that exists")
    if args.from_trace:
        if args.mesh:
            raise OptionError("--mesh has no effect with --from-trace: leave it out")
        _write(_from_traces(args), args)
        return 0
    from overlap_pass.profiling.calibrate import calibrate
    from overlap_pass.profiling.environment import device_name
    from overlap_pass.profiling.ranks import ranks

    mesh = mesh_of(args.mesh)
    with ranks("calibrate") as (device, first):
        found = calibrate(
            _base(args.base, device_name()), device, mesh=mesh, progress=_say if first else lambda _: None
        )
        if first:
            _write(found, args)
    return 0


def _base(asked: str | None, found: str | None) -> Hardware:
    """What was asked for, else the file of this GPU; a GPU that no file is for needs one to be named."""
    from overlap_pass.config import Config

    try:
        return Config.from_options({"hardware": asked}).hardware_for(found)
    except HardwareError as error:
        raise HardwareError(f"{error} (--base)") from error


def _from_traces(args: argparse.Namespace) -> Calibration:
    from overlap_pass.cost.calibration import calibrated
    from overlap_pass.profiling.trace_rates import trace_rates
    from overlap_pass.traces.files import find_traces

    found = trace_rates(find_traces(args.from_trace), args.gpus_per_node, progress=_say)
    return calibrated(found.measurements, _base(args.base, found.device_name), found.device_name or "traced machine")


def _say(what: str) -> None:
    print(f"calibrate: {what}", file=sys.stderr, flush=True)


def _write(found: Calibration, args: argparse.Namespace) -> None:
    import datetime

    from overlap_pass.cost.write import to_toml
    from overlap_pass.report import calibration_text

    how = "fitted to traces" if args.from_trace else "measured"
    heading = f"{found.hardware.name}, {how} on {datetime.date.today().isoformat()} by overlap-pass calibrate."
    args.output.write_text(to_toml(found.hardware, heading=heading, sources=found.sources), encoding="utf-8")
    print(json.dumps(found.to_json(), indent=1) if args.json else calibration_text.render(found), flush=True)
    _say(f"wrote {args.output}; use it with --hardware, --gpu or options={{'hardware': …}}")
