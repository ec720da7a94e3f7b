"""The gloo harness reports what happened on a rank, whatever that was, and never waits for a rank that cannot come."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist

from tests.cpu.ranks import RankError, run_cases, run_ranks


def add_up() -> tuple[int, list[float]]:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return dist.get_rank(), total.tolist()


def fail_on_the_last_rank() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def die() -> None:
    os._exit(7)


def wait_for_ever() -> None:
    threading.Event().wait()


def test_cases_share_their_ranks_and_the_first_failure_ends_the_run() -> None:
    outcomes = run_cases({"adds": add_up, "fails": fail_on_the_last_rank, "behind": add_up}, ranks=2)
    assert outcomes["adds"].values() == ((0, [3.0]), (1, [3.0]))
    with pytest.raises(RankError, match=r"(?s)rank 1:.*ZeroDivisionError: on purpose.*in case 'fails'"):
        outcomes["fails"].values()
    with pytest.raises(RankError, match="not run: case 'fails' failed before it"):
        outcomes["behind"].values()


def test_a_rank_that_dies_is_reported_by_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"1 ranks ended with exit codes \[7\]"):
        run_ranks(die, ranks=1)


def test_a_rank_that_never_ends_is_ended() -> None:
    with pytest.raises(RankError, match="1 ranks took longer than 1 s"):
        run_ranks(wait_for_ever, ranks=1, limit_s=1)
