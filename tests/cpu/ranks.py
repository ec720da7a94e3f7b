"""Runs functions on several gloo ranks of this machine, for every test file that needs real collectives.

Starting processes and importing torch in each costs seconds, so a test module starts its ranks once and runs all of its
cases there::

    @pytest.fixture(scope="module")
    def outcomes():
        return run_cases({"fp32": check_fp32, "bf16": partial(check, dtype=torch.bfloat16)}, ranks=2)

    def test_fp32_is_bitwise(outcomes):
        first, second = outcomes["fp32"].values()

Functions must be importable by name (module level, or ``functools.partial`` of such): the ranks are fresh processes.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["Outcome", "RankError", "fake_ranks", "run_cases", "run_ranks"]

# A rank waits this long for its peers in a collective.
PEER_TIMEOUT = timedelta(seconds=180)
# When one rank has failed, the others may fail on their own for this long, so that their tracebacks are seen too.
GRACE_S = 3.0


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message holds the traceback of each rank that left one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one case returned on each rank, or why there is no value."""

    returned: tuple[Any, ...] = ()
    failure: str | None = None

    def values(self) -> tuple[Any, ...]:
        """The value of each rank, in rank order.

        Raises:
            RankError: the case failed on some rank, or did not run because an earlier one failed.
        """
        if self.failure is not None:
            raise RankError(self.failure)
        return self.returned


@contextmanager
def fake_ranks(ranks: int, *, rank: int = 0) -> Iterator[None]:
    """A process group that pretends: collectives return at once with whatever is in memory. For graphs, not for numbers."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(function: Callable[..., Any], *args: Any, ranks: int = 2, limit_s: float = 600) -> list[Any]:
    """Call ``function(*args)`` on ``ranks`` fresh gloo ranks and return what each returned, in rank order.

    Raises:
        RankError: a rank raised, died, or the whole run took longer than ``limit_s`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        _run(Path(folder), function, args, ranks, limit_s)
        return [torch.load(Path(folder) / f"value-{rank}", weights_only=False) for rank in range(ranks)]


def run_cases(cases: Mapping[str, Callable[[], Any]], *, ranks: int = 2, limit_s: float = 600) -> dict[str, Outcome]:
    """Run named cases one after the other in one set of ranks.

    The first case that fails ends the run, because its ranks no longer agree on the next collective; the cases behind it
    get an outcome that says so.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        failure: str | None = None
        try:
            _run(Path(folder), _each_case, (folder, dict(cases)), ranks, limit_s)
        except RankError as error:
            failure = str(error)
        outcomes: dict[str, Outcome] = {}
        behind: str | None = None
        for number, name in enumerate(cases):
            files = [Path(folder) / f"case-{number}-{rank}" for rank in range(ranks)]
            if all(file.exists() for file in files):
                returned = tuple(torch.load(file, weights_only=False) for file in files)
                outcomes[name] = Outcome(returned=returned)
            else:
                outcomes[name] = Outcome(failure=failure)
                behind = behind or f"not run: case {name!r} failed before it"
                failure = behind
        return outcomes


def _each_case(folder: str, cases: Mapping[str, Callable[[], Any]]) -> None:
    for number, (name, case) in enumerate(cases.items()):
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            returned = case()
        except Exception as error:
            error.add_note(f"in case {name!r}")
            raise
        _save(returned, Path(folder) / f"case-{number}-{dist.get_rank()}")
        # No rank starts the next case while another could still fail in this one.
        dist.barrier()


def _run(folder: Path, function: Callable[..., Any], args: tuple[Any, ...], ranks: int, limit_s: float) -> None:
    context = get_context("spawn")
    workers = [
        context.Process(target=_work, args=(rank, ranks, folder, function, args), daemon=True) for rank in range(ranks)
    ]
    with _one_thread_each():
        for worker in workers:
            worker.start()
    try:
        in_time = _join(workers, limit_s)
    finally:
        exit_codes = [worker.exitcode for worker in workers]
        for worker in workers:
            worker.kill()
            worker.join()
    if in_time and all(code == 0 for code in exit_codes):
        return
    tracebacks = [
        f"rank {rank}:\n{path.read_text()}" for rank in range(ranks) if (path := folder / f"traceback-{rank}").exists()
    ]
    reason = f"ended with exit codes {exit_codes}" if in_time else f"took longer than {limit_s:.0f} s"
    raise RankError("\n".join([f"{ranks} ranks {reason}", *tracebacks]))


def _work(rank: int, ranks: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=PEER_TIMEOUT
        )
        _save(function(*args), folder / f"value-{rank}")
        # No rank leaves while another still talks to it.
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001  what ends a rank is for the parent to report, whatever it is
        (folder / f"traceback-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _save(value: Any, path: Path) -> None:
    """The file appears complete or not at all: the parent may look while ranks still write."""
    unfinished = path.with_suffix(".part")
    torch.save(value, unfinished)
    unfinished.rename(path)


def _join(workers: list[Any], limit_s: float) -> bool:
    """Wait until all have ended, or one has failed and the others had their moment to; False if the time ran out."""
    deadline = time.monotonic() + limit_s
    failed = False
    while alive := [worker.sentinel for worker in workers if worker.is_alive()]:
        if not failed and any(worker.exitcode not in (None, 0) for worker in workers):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return failed
        connection.wait(alive, timeout=left_s)
    return True


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Child processes read the variable when they import torch; many threads on few cores only slow the ranks down."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
