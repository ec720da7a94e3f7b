"""``overlap-pass calibrate`` on two CPU ranks: everything runs, every rank agrees, the file is used."""

from __future__ import annotations

import types
from functools import partial

import pytest
import torch
import torch.distributed as dist

from overlap_pass.cli.main import main
from overlap_pass.config import Config
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.cost.write import to_toml
from overlap_pass.errors import OptionError
from overlap_pass.profiling import copy_engine
from overlap_pass.profiling.calibrate import calibrate, groups
from overlap_pass.profiling.calibration_scale import Scale
from overlap_pass.transport import driver, peers
from tests.cpu.ranks import run_cases

SMALL = Scale(
    collective_bytes=(2**12, 2**14, 2**22),
    gemms=((16, 16, 16), (64, 64, 64), (256, 256, 256)),
    attention=(2, 32, 16),
    streamed_bytes=2**16,
    gather_bytes=2**12,
    reduce_bytes=2**12,
    busy_gemms=2,
    warm_rounds=1,
    launches=4,
    batches=1,
)


def measured(mesh: tuple[int, ...]) -> tuple[str, tuple[str, ...], list[str]]:
    found = calibrate(load_hardware("h200"), torch.device("cpu"), mesh=mesh, scale=SMALL)
    return to_toml(found.hardware, sources=found.sources), found.left_out, [point.what for point in found.points]


def group_sizes(mesh: tuple[int, ...]) -> list[tuple[str, int, int]]:
    return [(group.name, group.ranks, group.ranks_per_node) for group in groups(mesh)]


def refused(mesh: tuple[int, ...]) -> str:
    try:
        groups(mesh)
    except OptionError as error:
        return str(error)
    return f"accepted by rank {dist.get_rank()}"


@pytest.fixture(scope="module")
def outcomes():
    cases = {
        "measured": partial(measured, (2, 1)),
        "groups": partial(group_sizes, (2, 1)),
        "refused": partial(refused, (3, 2)),
    }
    return run_cases(cases, ranks=2)


def test_every_rank_gets_the_same_file(outcomes, tmp_path) -> None:
    (first, left_out, _), (second, *_) = outcomes["measured"].values()
    assert first == second
    file = tmp_path / "mine.toml"
    file.write_text(first)
    hardware = Config.from_options({"hardware": str(file)}).hardware_for(None)
    assert hardware.name == "CPU"
    assert hardware.intra_node.bandwidth_gb_per_s < 100  # two processes of one CPU are no NVLink
    assert [reason.partition(":")[0] for reason in left_out] == ["contention", "copy engine"]


def test_each_kind_and_size_is_measured(outcomes) -> None:
    points = outcomes["measured"].values()[0][2]
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert sum(point.startswith(f"{kind} of ") for point in points) == len(SMALL.collective_bytes)
    assert sum(point.startswith("GEMM") for point in points) == len(SMALL.gemms)


def test_groups_that_are_the_world_are_measured_once(outcomes) -> None:
    assert outcomes["groups"].values() == ([("world", 2, 2)], [("world", 2, 2)])


def test_a_mesh_of_another_size_is_refused_on_every_rank(outcomes) -> None:
    for message in outcomes["refused"].values():
        assert message == "mesh=3x2 has 6 places for 2 ranks"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "mine.json"], "must be a .toml file"),
        (["--output", "nowhere/mine.toml"], "in a folder that exists"),
        (["--output", "mine.toml", "--mesh", "2by4"], "--mesh='2by4' is no shape such as 2x4"),
        (["--output", "mine.toml", "--mesh", "2x4", "--from-trace", "t.json"], "has no effect with --from-trace"),
        (["--output", "mine.toml"], "calibrate runs on every rank: start it with torchrun"),
    ],
)
def test_input_that_cannot_be_used_is_named_in_one_line(capsys, monkeypatch, tmp_path, arguments, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    assert main(["calibrate", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_copies_are_measured_alone_from_every_peers_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks share 3000 bytes: 1000 of each peer, as much as a place takes: 1024."""
    staging = types.SimpleNamespace(addresses={0: 10_000, 1: 20_000, 2: 30_000})
    asked: list[int] = []
    line = types.SimpleNamespace(peers=(2, 0), staging=lambda size_bytes: asked.append(size_bytes) or staging)
    copied: list[tuple[object, ...]] = []
    monkeypatch.setattr(peers, "channel", lambda name, direction, device: line)
    monkeypatch.setattr(driver, "copy", lambda stream, *arguments: copied.append((stream, *arguments)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "side")
    group = types.SimpleNamespace(process_group=types.SimpleNamespace(group_name="group"), ranks=3)

    fetched = copy_engine._copies(3000, group, torch.device("cpu"))()

    assert asked == [1024]
    assert copied == [("side", fetched.data_ptr(), address, 1024) for address in (30_000, 10_000)]
