"""``plan``, ``strategies`` and ``sweep`` from the command line to the file, with a preset and with a model of one's own."""

from __future__ import annotations

import json

import pytest

from overlap_pass.cli.main import main
from overlap_pass.errors import CaptureError, OptionError
from overlap_pass.profiling.target import build_of
from overlap_pass.report import jsonfile

OWN = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def build(mesh, tokens=8):
    net = Net()
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), (torch.zeros(tokens, 64),)


def fixed(mesh):
    return build(mesh)
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_model_of_ones_own_is_planned_and_the_page_written(own, tmp_path, capsys) -> None:
    page, data = tmp_path / "plan.html", tmp_path / "plan.json"
    assert main(["plan", "--model", f"{own}:fixed", "--world", "4", "--output", str(page)]) == 0
    assert "gap to bound" in capsys.readouterr().out
    assert "prefers-color-scheme" in page.read_text()
    assert (
        main(["plan", "--model", f"{own}:build", "--world", "4", "--tokens", "16", "--json", "--output", str(data)])
        == 0
    )
    printed = capsys.readouterr().out
    assert jsonfile.loads(printed) == jsonfile.loads(data.read_text())
    assert ["tokens per rank", "16"] in json.loads(printed)["setting"]


def test_a_mesh_of_replicas_reduces_among_them_too(own, capsys) -> None:
    kinds = []
    for mesh in ("4", "2x2"):
        assert main(["plan", "--model", f"{own}:build", "--mesh", mesh, "--json"]) == 0
        spans = jsonfile.loads(capsys.readouterr().out).after.timeline.spans
        kinds.append({span.collective for span in spans if span.collective is not None})
    assert "all_reduce" in kinds[1] - kinds[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--mesh", "2x4", "--world", "16"), "--mesh=2x4 has 8 places for --world=16 ranks"),
        (("--mesh", "two"), "--mesh='two' is no shape such as 2x4"),
    ],
)
def test_a_mesh_that_cannot_be_is_said_in_one_line(own, given, said, capsys) -> None:
    assert main(["plan", "--model", f"{own}:build", *given]) == 2
    assert said in capsys.readouterr().err


def test_a_step_that_the_cpu_bounds_is_planned_shorter_where_it_is_recorded(own, capsys) -> None:
    """Matmuls of 64 × 64: next to nothing for a device, and launches of 0.2 ms a collective for the CPU."""
    plan = ["plan", "--model", f"{own}:fixed", "--world", "4", "--transport", "copy_engine", "--json"]

    def step_us(*more: str) -> float:
        assert main([*plan, *more]) == 0
        return jsonfile.loads(capsys.readouterr().out).after.step_median_us

    assert 10 * step_us("--mode", "reduce-overhead") < step_us()


@pytest.mark.parametrize("command", ["plan", "strategies", "sweep"])
def test_a_mode_that_torch_does_not_know_is_refused_with_those_it_does(own, capsys, command) -> None:
    assert main([command, "--model", f"{own}:build", "--mode", "nonsense"]) == 2
    assert "modes are default" in capsys.readouterr().err


def test_strategies_and_sweep_plan_a_step_that_the_cpu_bounds_shorter_where_it_is_recorded(own, capsys) -> None:
    """Where hundreds of launches are replayed as one graph, what is left are latencies and kernels of a few microseconds."""
    compared = ["strategies", "--model", f"{own}:build", "--world", "4", "--strategy", "as_written;greedy", "--json"]
    swept = ["sweep", "--model", f"{own}:build", "--world", "4,8", "--tokens", "8", "--json"]

    def steps_us(argv: list[str], rows: str, *more: str) -> list[float]:
        assert main([*argv, *more]) == 0
        said = json.loads(capsys.readouterr().out)
        assert ("reduce-overhead" in json.dumps(said)) == bool(more)
        return [row["step_us"] for row in said[rows]]

    for argv, rows in ((compared, "strategies"), (swept, "points")):
        pairs = list(zip(steps_us(argv, rows, "--mode", "reduce-overhead"), steps_us(argv, rows), strict=True))
        assert len(pairs) == 2
        assert all(replayed_us < issued_us for replayed_us, issued_us in pairs)


def test_all_strategies_are_compared_on_one_trace(own, capsys) -> None:
    assert main(["strategies", "--model", f"{own}:build", "--world", "4", "--json"]) == 0
    rows = {row["strategy"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert {"as_written", "latest_start", "greedy"} <= set(rows)
    assert rows["latest_start"]["step_us"] <= rows["as_written"]["step_us"]
    assert all(row["gap_percent"] >= -1e-6 for row in rows.values() if row["step_us"] is not None)


def test_only_the_strategies_named_are_compared(own, capsys) -> None:
    argv = [
        "strategies",
        "--model",
        f"{own}:build",
        "--world",
        "4",
        "--json",
        "--strategy",
        "greedy;backward_pre{depth=2}",
    ]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["strategies"]
    assert [row["strategy"] for row in rows] == ["greedy", "backward_pre{depth=2}"]


def test_a_sweep_has_a_point_for_every_combination(own, tmp_path, capsys) -> None:
    page = tmp_path / "sweep.html"
    argv = ["sweep", "--model", f"{own}:build", "--tokens", "8,64", "--world", "4,8", "--budget", "fsdp2,unlimited"]
    assert main([*argv, "--json", "--output", str(page)]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert len({(p["tokens"], p["world_size"], p["budget"]) for p in points}) == 8
    assert page.read_text().count("<circle") == 8


def test_what_stays_by_budget_makes_every_step_of_a_sweep_shorter(own, capsys) -> None:
    argv = ["sweep", "--model", f"{own}:build", "--tokens", "8", "--world", "4,8", "--budget", "unlimited", "--json"]
    found = {}
    for reshard in ("user", "auto"):
        assert main([*argv, "--reshard", reshard]) == 0
        found[reshard] = json.loads(capsys.readouterr().out)["points"]
    for user, auto in zip(found["user"], found["auto"], strict=True):
        assert auto["world_size"] == user["world_size"]
        assert auto["step_us"] < user["step_us"]


def test_what_stays_by_budget_goes_for_all_strategies(own, capsys) -> None:
    argv = ["strategies", "--model", f"{own}:build", "--world", "4", "--budget", "unlimited", "--strategy", "greedy"]
    steps_us = []
    for reshard in ("user", "auto"):
        assert main([*argv, "--json", "--reshard", reshard]) == 0
        steps_us += [row["step_us"] for row in json.loads(capsys.readouterr().out)["strategies"]]
    assert steps_us[1] < steps_us[0]


@pytest.mark.parametrize(
    ("target", "tokens", "message"),
    [
        ("llama3-8", None, "llama3-8b"),
        ("no_such_module:build", None, "no_such_module"),
        ("missing.py:build", None, "there is no file"),
        ("{own}:nothing", None, "defines no function 'nothing'"),
        ("{own}:fixed", 8, "no parameter 'tokens'"),
    ],
)
def test_what_is_no_model_is_named(own, target, tokens, message) -> None:
    with pytest.raises(OptionError, match=message):
        build_of(target.format(own=own), tokens=tokens)


def test_a_model_that_cannot_be_built_is_named_with_what_it_raised(tmp_path) -> None:
    script = tmp_path / "mine.py"
    script.write_text("def build(mesh):\n    raise KeyError('width')\n")
    build = build_of(f"{script}:build", tokens=None)
    with pytest.raises(CaptureError, match=r"mine\.py:build': called with the mesh it raised KeyError: 'width'"):
        build(None)
