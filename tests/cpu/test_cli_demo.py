"""The demo: what it refuses, what it says when ranks fail, and the whole of it once on a small model."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time

import pytest
import torch
import torch.multiprocessing as mp

from overlap_pass.cli import demo, demo_training
from overlap_pass.cli.demo_training import RANKS, STEPS, TrainingReport
from overlap_pass.cli.main import main
from overlap_pass.errors import CaptureError
from overlap_pass.profiling.llama import PRESETS, Llama
from tests.checks.sources import ROOT
from tests.pure.comparisons import predicted

EQUAL = TrainingReport((5.5, 5.25), (5.5, 5.25), gradients=8, differing=())
UNEQUAL = TrainingReport((5.5, 5.25), (5.5, 5.125), gradients=8, differing=("head.weight",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world", "1"], "--world=1 is too small: at least 2"),
        (["--tokens", "0"], "--tokens=0 is too small: at least 1"),
        (["--strategy", "fastest"], "strategy='fastest' is no strategy"),
        (["--memory-budget", "-1GiB"], "memory_budget='-1GiB' is no budget"),
        (["--hardware", "h101"], "hardware='h101' is not known"),
        (["--model", "bench-3b"], "model='bench-3b' is no preset: did you mean"),
        (["--output", "no/such/folder/page.html"], "--output=no/such/folder/page.html: the folder"),
        (["--output", "page.pdf"], "--output=page.pdf must end in .html"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(demo_training, "compare_training", lambda show: pytest.fail("trained"))
    argument, value = arguments
    assert main(["demo", f"{argument}={value}"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.fixture
def run_demo(monkeypatch, tmp_path):
    """Runs the command with a training and a plan that are given."""

    def run(training: TrainingReport, *flags: str) -> int:
        monkeypatch.setattr(demo_training, "compare_training", lambda show: training)
        monkeypatch.setattr(demo, "_plan", lambda args, progress: predicted())
        return main(["demo", "--output", str(tmp_path / "page.html"), *flags])

    return run


def test_equal_numbers_are_said_to_be_equal_and_the_page_is_written(run_demo, capsys, tmp_path):
    assert run_demo(EQUAL) == 0
    printed = capsys.readouterr().out
    assert "   2        5.250000000    5.250000000" in printed.splitlines()
    assert "losses and all 8 gradient shards are equal bit for bit" in printed
    assert predicted().verdict in " ".join(printed.split()), "wrapped or not"
    assert "<html" in (tmp_path / "page.html").read_text()


def test_unequal_numbers_are_named_and_exit_code_1(run_demo, capsys):
    assert run_demo(UNEQUAL) == 1
    assert "NOT EQUAL: compared 8 gradient shards; differing parameters: head.weight" in capsys.readouterr().out


def test_losses_that_differ_are_unequal_even_where_gradients_agree():
    assert not TrainingReport((1.0,), (1.5,), gradients=4, differing=()).equal


class FailedRanks:
    """A process context whose ranks have failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def join(self, timeout: float) -> bool:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            mp.ProcessRaisedException("\n\n-- Process 1 --\nTraceback …\n  File …\nValueError: bad shape", 1, 4242),
            "rank 1 of the demo's training: ValueError: bad shape",
        ),
        (
            mp.ProcessExitedException("process 0 terminated with signal SIGKILL", 0, 4242, exit_code=-9),
            "rank 0 of the demo's training died: process 0 terminated with signal SIGKILL",
        ),
    ],
)
def test_a_rank_that_fails_is_one_line_with_its_number(error, message):
    with pytest.raises(CaptureError) as caught:
        demo_training._follow(FailedRanks(error), None, print, deadline=time.monotonic() + 60)
    assert str(caught.value) == message


def test_ranks_beyond_their_time_are_ended(monkeypatch):
    monkeypatch.setattr(demo_training, "LIMIT_S", 0)
    with pytest.raises(CaptureError, match="did not end within 0 s"):
        demo_training.compare_training(print)
    assert multiprocessing.active_children() == []


def test_the_whole_demo_on_a_small_model(tmp_path):
    page = tmp_path / "page.html"
    arguments = ["demo", "--model", "tiny", "--tokens", "64", "--json", "--output", str(page)]
    done = subprocess.run(
        [sys.executable, "-m", "overlap_pass", *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    training = printed["training"]
    assert training["equal"]
    assert training["gradients"] == RANKS * STEPS * len(list(Llama(PRESETS["tiny"]).parameters()))
    assert training["losses_eager"] == training["losses_overlap"]
    assert training["losses_eager"][-1] < training["losses_eager"][0]
    assert printed["comparison"]["after"]["predicted"]
    assert f"training, backend overlap: step {STEPS} of {STEPS}" in done.stderr.splitlines()
    assert "<html" in page.read_text()


README = ROOT / "README.md"
PRINTED = re.compile(r"(?<=^```text\n)small Llama on.*?\n(?=```$)", re.DOTALL | re.MULTILINE)
PINNED = re.search(r"^torch==(\S+)$", (ROOT / "requirements-ci.txt").read_text("utf-8"), re.MULTILINE)[1]


@pytest.mark.skipif(not torch.__version__.startswith(PINNED), reason=f"the README shows torch {PINNED}")
def test_the_readme_shows_what_the_demo_prints(tmp_path, golden):
    """The plan to the letter. Losses are those of one kind of CPU, so of them only the words around are compared."""
    command = [sys.executable, "-m", "overlap_pass", "demo", "--skip-training"]
    plain = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    page = README.read_text("utf-8")
    losses = [tuple(map(float, row)) for row in re.findall(r"^ +\d  +(\d\.\d+)  +(\d\.\d+)$", page, re.MULTILINE)]
    eager, overlap = zip(*losses, strict=True)
    gradients = RANKS * STEPS * len(list(Llama(PRESETS["tiny"]).parameters()))
    training = demo._training_text(TrainingReport(eager, overlap, gradients=gradients, differing=()))
    assert len(losses) == STEPS
    golden(README, PRINTED.sub(lambda _: f"{training}\n\n{done.stdout}", page))
