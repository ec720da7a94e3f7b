"""Random models, eager FSDP2 beside ``overlap_eager``, bit for bit: ``python -m tests.bench.fuzz --models 200``.

Two gloo ranks train each model both ways. Every verdict is a line of a log; a run that was stopped goes on behind the last
one. ``--seed N`` shows one of them, and a seed that failed becomes a test.

A difference is not yet a fault of ours. Where torch traces ``dropout`` (for any backend), the gradient is multiplied by mask
and 1/(1 − p), in eager code by their quotient in the dtype of the activation: in bfloat16 that is another number. Whether it was
that alone is not believed but tried: eager FSDP2 trains the model once more with the dropout that tracing puts in its place,
and must then give every bit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.bench.random_models import Drawn, draw
from tests.cpu.ranks import Outcome, RankError, run_cases
from tests.cpu.test_backend_numerics import SLOW, no_compile_cache, watched_plans
from tests.cpu.training import Recipe, Training, adamw, differences, train

__all__ = ["Judgement", "Verdict", "against_fsdp2", "against_inductor", "dropout_as_traced", "judged", "verdicts"]

_MODELS_A_SPAWN = 20
_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank saw of one model.

    Attributes:
        wrong: losses, gradients and parameters that differ in a bit.
        launches: hashes of the launches of its graphs, to be the same on every rank.
        moved: collectives that ran elsewhere than written.
        traced: eager FSDP2 gives these bits with dropout as torch traces it.
    """

    wrong: tuple[str, ...]
    launches: tuple[str, ...]
    moved: int
    traced: bool = False


@dataclass(frozen=True, slots=True)
class Judgement:
    """What all ranks together saw of one model: a line of the log.

    Attributes:
        verdict: ``"same"`` bits; ``"traced"``: they differ, by torch's tracing; ``"differs"``; ``"failed"``: an error or an abort.
        detail: what differs, or the tracebacks.
        moved: collectives that ran elsewhere than written.
    """

    verdict: Literal["same", "traced", "differs", "failed"]
    detail: str = ""
    moved: int = 0

    @property
    def is_fault(self) -> bool:
        return self.verdict in ("differs", "failed")


def against_fsdp2(seed: int, most_blocks: int = 3) -> Verdict:
    """One model under eager FSDP2 and compiled with ``overlap_eager``."""
    drawn = draw(seed, most_blocks)
    expected = _trained(drawn)
    with watched_plans() as plans:
        found = _trained(drawn, {"backend": "overlap_eager", "options": {"hardware": SLOW, **drawn.options}})
    wrong = differences(expected, found)
    traced = False
    if _on_any_rank(bool(wrong)):
        with dropout_as_traced():
            traced = not differences(_trained(drawn), found)
    return Verdict(tuple(wrong), tuple(plan.launches for plan in plans), sum(plan.moved for plan in plans), traced)


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


@contextmanager
def dropout_as_traced() -> Iterator[None]:
    with mock.patch.object(F, "dropout", lambda x, p: torch.native_dropout(x, p, True)[0]):
        yield


def _on_any_rank(value: bool) -> bool:
    flag = torch.tensor(int(value))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _trained(drawn: Drawn, settings: Mapping[str, Any] | None = None) -> Training:
    model = drawn.build()
    optimizer = adamw(model)
    call = None if settings is None else torch.compile(model, fullgraph=True, **settings)
    torch.manual_seed(7 + dist.get_rank())  # masks are part of the numbers
    return train(model, optimizer, Recipe(drawn.batch, accumulate=drawn.accumulate, steps=2), call=call)


def verdicts(seeds: Sequence[int], check: Callable[[int], Verdict] = against_fsdp2) -> Iterator[tuple[int, Judgement]]:
    """Each seed with its judgement, as they come. A model that fails ends its ranks; fresh ones go on behind it."""
    waiting = list(seeds)
    while waiting:
        chunk, waiting = waiting[:_MODELS_A_SPAWN], waiting[_MODELS_A_SPAWN:]
        outcomes = run_cases({str(seed): partial(check, seed) for seed in chunk}, ranks=2, limit_s=_LIMIT_S)
        done = 0
        for seed in chunk:
            done += 1
            yield seed, judged(outcomes[str(seed)])
            if outcomes[str(seed)].failure is not None:
                break
        waiting = chunk[done:] + waiting


def judged(outcome: Outcome) -> Judgement:
    """What is to be said of a model, given what each rank saw of it."""
    try:
        first, second = outcome.values()
    except RankError as error:
        return Judgement("failed", str(error))
    if first.launches != second.launches:
        return Judgement("differs", f"ranks launch differently: {first.launches} and {second.launches}", first.moved)
    wrong = "; ".join(sorted({*first.wrong, *second.wrong}))
    if not wrong:
        return Judgement("same", moved=first.moved)
    return Judgement("traced" if first.traced and second.traced else "differs", wrong, first.moved)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (%(default)s)")
    parser.add_argument("--seed", type=int, help="this one only, and what it is")
    parser.add_argument("--inductor", action="store_true", help="Inductor in both orders, in place of eager FSDP2")
    parser.add_argument("--log", type=Path, default=Path("fuzz.jsonl"), help="a line for each model (%(default)s)")
    args = parser.parse_args(argv)
    check = against_inductor if args.inductor else against_fsdp2
    if args.seed is not None:
        print(draw(args.seed))
        ((_, judgement),) = verdicts([args.seed], check)
        print(f"{judgement.verdict}: {judgement.detail or 'every bit'}")
        return int(judgement.is_fault)
    return _run(range(args.first, args.first + args.models), check, args.log)


def _run(seeds: Sequence[int], check: Callable[[int], Verdict], log: Path) -> int:
    counted = Counter[str]()
    done = set()
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        entry = json.loads(line)
        done.add(entry["seed"])
        counted[entry["verdict"]] += 1
    began_s = time.monotonic()
    for seed, judgement in verdicts([seed for seed in seeds if seed not in done], check):
        counted[judgement.verdict] += 1
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": seed, **asdict(judgement)}) + "\n")
        if judgement.is_fault:
            print(f"{draw(seed)}\n{judgement.verdict}: {judgement.detail}", flush=True)
        print(f"seed {seed}: {judgement.verdict}, {time.monotonic() - began_s:.0f} s", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counted.items())))
    return int(counted["differs"] + counted["failed"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
