"""Random models, eager FSDP2 beside ``overlap_eager``, bit for bit: ``python -m tests.bench.fuzz --models 200``.

Two gloo ranks train each model both ways. Seeds that fail are printed and written to a file; ``--seed N`` runs one of them
again, and it becomes a test.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.random_models import Drawn, draw
from tests.cpu.ranks import Outcome, RankError, run_cases
from tests.cpu.test_backend_numerics import SLOW, no_compile_cache, watched_plans
from tests.cpu.training import Recipe, Training, adamw, differences, train

__all__ = ["Verdict", "against_fsdp2", "against_inductor", "judged", "verdicts"]

_MODELS_A_SPAWN = 20
_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank saw of one model.

    Attributes:
        wrong: losses, gradients and parameters that differ in a bit.
        launches: hashes of the launches of its graphs, to be the same on every rank.
        moved: collectives that ran elsewhere than written.
    """

    wrong: tuple[str, ...]
    launches: tuple[str, ...]
    moved: int


def against_fsdp2(seed: int, most_blocks: int = 3) -> Verdict:
    """One model under eager FSDP2 and compiled with ``overlap_eager``."""
    drawn = draw(seed, most_blocks)
    expected = _trained(drawn, None)
    with watched_plans() as plans:
        found = _trained(drawn, {"backend": "overlap_eager", "options": {"hardware": SLOW, **drawn.options}})
    moved = sum(plan.moved for plan in plans)
    return Verdict(tuple(differences(expected, found)), tuple(plan.launches for plan in plans), moved)


def against_inductor(seed: int, most_blocks: int = 3) -> Verdict:
    """One model compiled by Inductor twice, in the order as written and as planned."""
    drawn = draw(seed, most_blocks)
    options = {key: value for key, value in drawn.options.items() if key == "reduction"}
    with no_compile_cache():
        expected = _trained(drawn, {"backend": "overlap", "options": {**options, "strategy": "as_written"}})
        torch._dynamo.reset()
        with watched_plans() as plans:
            found = _trained(drawn, {"backend": "overlap", "options": {"hardware": SLOW, **drawn.options}})
    moved = sum(plan.moved for plan in plans)
    return Verdict(tuple(differences(expected, found)), tuple(plan.launches for plan in plans), moved)


def _trained(drawn: Drawn, settings: Mapping[str, Any] | None) -> Training:
    model = drawn.build()
    optimizer = adamw(model)
    call = None if settings is None else torch.compile(model, fullgraph=True, **settings)
    torch.manual_seed(7 + dist.get_rank())  # masks are part of the numbers
    return train(model, optimizer, Recipe(drawn.batch, accumulate=drawn.accumulate, steps=2), call=call)


def verdicts(seeds: Sequence[int], check: Any = against_fsdp2) -> Iterator[tuple[int, str]]:
    """(seed, what is wrong or "") for each, as they come. A model that fails ends its ranks; fresh ones go on behind it."""
    waiting = list(seeds)
    while waiting:
        chunk, waiting = waiting[:_MODELS_A_SPAWN], waiting[_MODELS_A_SPAWN:]
        outcomes = run_cases({str(seed): partial(check, seed) for seed in chunk}, ranks=2, limit_s=_LIMIT_S)
        done = 0
        for seed in chunk:
            done += 1
            problem = judged(outcomes[str(seed)])
            yield seed, problem
            if outcomes[str(seed)].failure is not None:
                break
        waiting = chunk[done:] + waiting


def judged(outcome: Outcome) -> str:
    """What is wrong with a model, "" for nothing."""
    try:
        first, second = outcome.values()
    except RankError as error:
        return str(error)
    wrong = sorted({*first.wrong, *second.wrong})
    if first.launches != second.launches:
        wrong.append(f"ranks launch differently: {first.launches} and {second.launches}")
    return "; ".join(wrong)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one only, and what it is")
    parser.add_argument("--inductor", action="store_true", help="Inductor in both orders, in place of eager FSDP2")
    parser.add_argument(
        "--failures", type=Path, default=Path("fuzz-failures.json"), help="file for those that fail (%(default)s)"
    )
    args = parser.parse_args(argv)
    seeds = list(range(args.first, args.first + args.models)) if args.seed is None else [args.seed]
    if args.seed is not None:
        print(draw(args.seed))
    failed: dict[int, str] = {}
    began_s = time.monotonic()
    check = against_inductor if args.inductor else against_fsdp2
    for number, (seed, problem) in enumerate(verdicts(seeds, check), start=1):
        if problem:
            failed[seed] = problem
            args.failures.write_text(json.dumps(failed, indent=1), encoding="utf-8")
            print(f"seed {seed}: {draw(seed)}\n{problem}", flush=True)
        if number % 10 == 0 or number == len(seeds):
            print(
                f"{number} of {len(seeds)} models, {len(failed)} differ, {time.monotonic() - began_s:.0f} s", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
