"""All systems side by side for several token counts: what the tables of docs/results are made of.

    torchrun --nproc-per-node 2 -m tests.bench.h200 --tokens 1024,4096 --record results.json
    torchrun --nproc-per-node 2 -m tests.bench.h200 --tokens 8192 --transport host --record results.json
    torchrun --nproc-per-node 2 -m tests.bench.h200 --model bench-1b --tokens 4096 --record results.json
    torchrun --nproc-per-node 2 -m tests.bench.h200 --systems as-written,fsdp2 --optimizer adamw --edge --record results.json
    python -m tests.bench.h200 --table results.json

Each case is added to the record as soon as it is measured. Every system is compiled for every token count (20 to 30 s each
for the 2 B model), so what does not fit into one call is split by ``--tokens`` or ``--systems``; what is to be compared
closely belongs into one call, since a machine is not the same from one to the next. Without a GPU everything runs over
gloo, as a rehearsal: ``--model tiny --tokens 64``. ``--imagined 8`` runs one process as rank 0 of eight whose peers are not
there: every collective ends at once with this rank's own data for everybody's. What is allocated is what that rank would
allocate, times are of its compute and of local copies. ``--optimizer`` makes the optimizer part of every system's step, and
``--edge`` adds twins of each of ours that gather, and gather and reduce, across the step's edge.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from overlap_pass.fsdp.edge import StepEdge
from overlap_pass.profiling.environment import concerns
from overlap_pass.profiling.measure import Effort, measure
from overlap_pass.profiling.variants import BASELINES, Variant, scheduled
from overlap_pass.profiling.verify import setting
from overlap_pass.profiling.workload import MakeStep, load_make_step
from overlap_pass.report import verification_text
from overlap_pass.report.verification import Verification
from tests.cpu.ranks import fake_ranks

SCHEMA = "overlap-pass/bench/1"
SYSTEMS = "as-written,compute-only,fsdp2,fsdp2-compile,torch-overlap,torch-manual"
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-5),
    "adamw-fused": partial(torch.optim.AdamW, lr=1e-5, fused=True),
    "sgd": partial(torch.optim.SGD, lr=1e-5),
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "llama.py"


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.edge and args.optimizer is None:
        parser().error("--edge runs beside an optimizer: name one by --optimizer")
    if args.numbers and args.optimizer is not None:
        parser().error("--numbers compares gradients of one set of parameters, which an --optimizer changes")
    if args.table:
        print(table([case for record in args.table for case in json.loads(record.read_text("utf-8"))["cases"]]))
        return 0
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if args.transport == "host":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    with ranks(args.imagined) as device:
        for tokens in args.tokens:
            found = run(args, tokens, device)
            if dist.get_rank() == 0:
                print(verification_text.render(found), flush=True)
                if args.record is not None:
                    add(args.record, case(args, tokens), found)
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, default=(4096,), help="tokens a rank, separated by commas")
    parser.add_argument("--model", default="bench-2b", help="a preset of profiling.llama (%(default)s)")
    parser.add_argument("--systems", default=SYSTEMS, help="separated by commas, the reference first (%(default)s)")
    parser.add_argument(
        "--ours", action="append", metavar="NAME=VALUE;…", help="options of a scheduled system; several for several"
    )
    parser.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), help="steps are optimizer steps, too (default: none)"
    )
    parser.add_argument("--edge", action="store_true", help="each of ours twice more, with a StepEdge")
    parser.add_argument("--transport", choices=("nvlink", "host"), default="nvlink", help="host: NCCL_P2P_DISABLE=1")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: so many groups hold the model (%(default)s)")
    parser.add_argument("--imagined", type=int, metavar="RANKS", help="one process, as rank 0 of so many")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--profiled", type=int, default=4, help="profiled steps of each system, 0 for none")
    parser.add_argument("--traces", type=Path, help="folder to keep the profiler's traces in")
    parser.add_argument("--numbers", action="store_true", help="compare losses and gradients (compiles all once more)")
    parser.add_argument("--record", type=Path, help="JSON file that the cases are added to")
    parser.add_argument("--table", type=Path, nargs="+", help="print the table of these records and measure nothing")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@contextmanager
def ranks(imagined: int | None = None) -> Iterator[torch.device]:
    """The process group that torchrun set this process up for, or one of imagined ranks; yields this rank's device."""
    if imagined is not None:
        with fake_ranks(imagined):
            yield torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def run(args: argparse.Namespace, tokens: int, device: torch.device) -> Verification:
    """One case: every system, interleaved."""
    make_step: MakeStep = load_make_step(
        f"{EXAMPLE}:make_step", {"model": args.model, "tokens": tokens, "replicas": args.replicas}
    )
    if args.optimizer is not None:
        make_step = with_optimizer(make_step, OPTIMIZERS[args.optimizer])
    effort = Effort(args.warm_up, args.rounds, args.steps, args.profiled, args.numbers)
    ours = [options(text) for text in args.ours or [""]]
    measured = measure(
        make_step,
        variants(args.systems, ours, edge=args.edge),
        effort,
        device=device,
        progress=partial(say, tokens),
        traces=_folder(args.traces, tokens),
    )
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    start = ["torchrun", "--nproc-per-node", str(dist.get_world_size())] if args.imagined is None else ["python"]
    command = [*start, "-m", "tests.bench.h200", *sys.argv[1:]]
    found = (
        *setting(effort, ours[0] if len(ours) == 1 else {}),
        ("transport", _between(args)),
        ("optimizer", args.optimizer or "none"),
        ("command", shlex.join(command)),
        ("date", datetime.date.today().isoformat()),
    )
    replicas = f"{args.replicas} replicas" if args.replicas > 1 else None
    what = (f"{args.model}, {tokens} tokens a rank, {_between(args)}", replicas, args.optimizer)
    title = ", ".join(filter(None, what))
    warnings = (*concerns(), *measured.warnings)
    return Verification(title, measured.systems, measured.left_out, warnings, found)


def _folder(traces: Path | None, tokens: int) -> Path | None:
    if traces is None:
        return None
    folder = traces / f"t{tokens}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def variants(systems: str, ours: Sequence[dict[str, str]], *, edge: bool = False) -> tuple[Variant, ...]:
    baselines = [BASELINES[name] for name in systems.split(",") if name]
    names = ["; ".join(["overlap", *(f"{name}={value}" for name, value in given.items())]) for given in ours]
    made = [scheduled(given, name) for given, name in zip(ours, names, strict=True)]
    return (*baselines, *(twin for one in made for twin in ((one, *across_steps(one)) if edge else (one,))))


_edged: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models that are stepped by a StepEdge, and whether it runs their backward, too."""


def across_steps(variant: Variant) -> tuple[Variant, ...]:
    """The same with the first gathers launched beside the optimizer, and with the last reductions beside it, too."""

    def prepare(whole: bool, model: nn.Module) -> Callable[..., Any]:
        _edged[model] = whole
        return variant.prepare(model)

    return tuple(
        replace(variant, name=f"{variant.name}; {what} across steps", prepare=partial(prepare, whole))
        for what, whole in (("gathers", False), ("gathers, reductions", True))
    )


def with_optimizer(make_step: MakeStep, make_optimizer: Callable[..., torch.optim.Optimizer]) -> MakeStep:
    """The same step with the optimizer's behind it, which is made in the first step: some systems exchange parameters."""

    def make() -> tuple[nn.Module, Callable[..., Tensor], Sequence[Any]]:
        model, step, data = make_step()
        steppers: list[Any] = []

        def train(run: Callable[..., Any], *batch: Any) -> Tensor:
            if not steppers:
                optimizer = make_optimizer(model.parameters())
                steppers.append(StepEdge(model, optimizer) if model in _edged else optimizer)
            if _edged.get(model):  # the example's step is forward and backward
                loss = run(*batch)
                steppers[0].step(loss)
                return loss.detach()
            loss = step(run, *batch)
            steppers[0].step()
            return loss

        return model, train, data

    return make


def options(text: str) -> dict[str, str]:
    """``"strategy=latest_start{margin=1.25};coalesce=off"`` as a mapping."""
    return dict(pair.split("=", 1) for pair in filter(None, text.split(";")))


def say(tokens: int, what: str) -> None:
    if dist.get_rank() == 0:
        print(f"{tokens} tokens, {what}", file=sys.stderr, flush=True)


def case(args: argparse.Namespace, tokens: int) -> dict[str, Any]:
    found = {"model": args.model, "tokens": tokens, "transport": _between(args), "ranks": dist.get_world_size()}
    if args.replicas > 1:
        found["replicas"] = args.replicas
    return found if args.optimizer is None else {**found, "optimizer": args.optimizer}


def _between(args: argparse.Namespace) -> str:
    """What lies between the ranks."""
    return args.transport if args.imagined is None else "imagined peers"


def add(record: Path, case: dict[str, Any], found: Verification) -> None:
    cases = json.loads(record.read_text("utf-8"))["cases"] if record.exists() else []
    content = {"schema": SCHEMA, "cases": [*cases, {"case": case, "verification": found.to_json()}]}
    record.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(cases: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each system, a column for each case; of a case measured twice the later figures."""
    columns: dict[str, dict[str, str]] = {}
    for entry in cases:
        heading = "{model}, T={tokens}, {transport}, {ranks} ranks".format(**entry["case"])
        heading += f", {entry['case']['replicas']} replicas" if "replicas" in entry["case"] else ""
        heading += f", {entry['case']['optimizer']}" if "optimizer" in entry["case"] else ""
        column = columns.setdefault(heading, {})
        for system in entry["verification"]["systems"]:
            column[system["name"]] = cell(system)
        for system in entry["verification"]["left_out"]:
            column.setdefault(system["name"], "failed")
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = ["| system | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(column.get(name, "–") for column in columns.values()) + " |")
    return "\n".join(lines)


def cell(system: dict[str, Any]) -> str:
    """``104.7 (104.2–105.1), 10.1 GiB``: median of the steps and its interval in ms, peak allocated."""
    interval = system["step_interval_us"]
    low_ms, high_ms = interval["low"] / 1e3, interval["high"] / 1e3
    return f"{system['step_median_us'] / 1e3:.1f} ({low_ms:.1f}–{high_ms:.1f}), {system['peak_bytes'] / 2**30:.1f} GiB"


if __name__ == "__main__":
    raise SystemExit(main())
