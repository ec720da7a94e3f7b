"""Where in its launches a graph is, told when it raises or does not come through."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compile_backends.trail import Trail, report_overdue, with_trail
from overlap_pass.transport import ops
from overlap_pass.transport.total import Total
from tests.cpu.ranks import fake_ranks

C10D = torch.ops._c10d_functional
LINES = ("gather of a", "gather of b and c", "reduction of a")


@pytest.fixture
def group() -> Iterator[str]:
    with fake_ranks(2):
        yield dist.group.WORLD.group_name


def trail_of(run: Any) -> str:
    with pytest.raises(ZeroDivisionError) as caught:
        with_trail(run, "backward", LINES, limit_s=60)([torch.ones(2, 2)])
    (note,) = caught.value.__notes__
    return str(note)


def test_before_the_first_launch(group: str) -> None:
    told = trail_of(lambda arguments: 1 / 0)
    assert told == "graph 'backward': launched 0 of 3; next #1 (gather of a)\n  0 waits passed"


def test_launches_and_waits_are_told_apart_and_by_number(group: str) -> None:
    def run(arguments: list[Any]) -> None:
        (shard,) = arguments
        a = C10D.all_gather_into_tensor(shard, 2, group)
        b, c = C10D.all_gather_into_tensor_coalesced([shard, shard], 2, group)
        for gathered in (b, c, a):
            C10D.wait_tensor(gathered)
        1 / 0  # noqa: B018

    told = trail_of(run)
    assert "launched 2 of 3, last #2 (gather of b and c); next #3 (reduction of a)" in told
    assert told.endswith("3 waits passed, last for #1 (gather of a)")


def test_a_launch_that_raises_is_where_the_host_is(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(arguments: list[Any]) -> None:
        ops.GATHER_START(arguments[0], torch.float32, 2, group, [])

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("overlap_pass.transport.collectives.start_gather", broken)
    assert trail_of(run).endswith("; the host is in the launch of #1 (gather of a)")


def test_sums_of_exchanges_are_waits(group: str) -> None:
    def run(arguments: list[Any]) -> None:
        how = (Total(False, torch.float32).spec, 2, group, True, [])
        token = ops.EXCHANGE_START(arguments[0], *how)
        ops.EXCHANGE_FINISH(token, arguments[0], *how)
        1 / 0  # noqa: B018

    assert trail_of(run).endswith("1 waits passed, last for #1 (gather of a)")


def test_the_wait_for_what_another_graph_launched(group: str) -> None:
    launched = C10D.all_gather_into_tensor(torch.ones(2, 2), 2, group)

    def run(arguments: list[Any]) -> None:
        C10D.wait_tensor(launched)
        1 / 0  # noqa: B018

    assert "last for a collective of another graph" in trail_of(run)


def test_a_run_that_is_overdue_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    late, early = Trail("forward", LINES, started_s=100.0), Trail("backward", LINES, started_s=390.0)
    with caplog.at_level(logging.ERROR, logger="overlap_pass"):
        for now_s in (399.0, 401.0, 402.0):
            report_overdue([late, early], 300.0, now_s)
    (record,) = caplog.records
    assert "not through after 301 s: graph 'forward': launched 0 of 3" in record.getMessage()


def test_a_run_is_through_when_the_host_has_returned(group: str) -> None:
    trail = Trail("forward", LINES)
    assert not trail.through()
    trail.returned = True
    assert trail.through()


def test_results_and_boxed_arguments_are_those_of_the_graph(group: str) -> None:
    def run(arguments: list[Any]) -> int:
        arguments.clear()
        return 5

    given = [torch.ones(1)]
    assert with_trail(run, "forward", LINES, limit_s=60)(given) == 5
    assert given == []
