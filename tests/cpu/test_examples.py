"""The example scripts do on two CPU processes what their docstrings say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checks.sources import ROOT
from tests.pure.drawn_traces import GEMM, NCCL, Trace

HUGGING_FACE = "hugging_face_llama.py"
FAST = ["--backend", "overlap_eager", "--steps", "3"]
TRAINED = {
    "plain.py": FAST,
    "llama.py": FAST,
    HUGGING_FACE: FAST,
    "hsdp.py": [*FAST, "--replicas", "1"],
    "accumulate.py": [*FAST, "--micro-batches", "2"],
}
FOUND = {path.relative_to(ROOT / "examples").parts[0] for path in (ROOT / "examples").glob("**/*.py")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder) -> dict[str, str]:
    """What rank 0 printed, by script; all of them in one torchrun."""
    sweep = ["batch_sizes.py", *FAST[:2], "--steps", "2", "--rows", "4,8", "--output", str(folder / "chart.svg")]
    trained = {
        name: arguments for name, arguments in TRAINED.items() if name != HUGGING_FACE or find_spec("transformers")
    }
    calls = [json.dumps([name, *arguments]) for name, arguments in trained.items()] + [json.dumps(sweep)]
    done = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("tests/cpu/examples_driver.py", str(folder), *calls),
    )
    return dict(re.findall(r"== (\S+)\n(.*?)(?=== |\Z)", done, re.DOTALL))


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_in_the_list_and_has_a_test():
    page = (ROOT / "examples" / "README.md").read_text("utf-8")
    assert {*TRAINED, "batch_sizes.py", "custom_strategy", "someone_elses_trace.py"} == FOUND
    assert not {name for name in FOUND if f"[{name}]({name})" not in page}


@pytest.mark.parametrize("name", TRAINED)
def test_the_loss_falls(printed, name):
    if name == HUGGING_FACE:
        pytest.importorskip("transformers")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)", printed[name], re.MULTILINE)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]


def test_the_batch_sizes_are_measured_and_drawn(printed, folder):
    rows = re.findall(
        r"^(\d+) rows: eager FSDP2 [\d.]+ µs a row, overlap_eager [\d.]+ µs a row$", printed["batch_sizes.py"], re.M
    )
    assert rows == ["4", "8"]
    assert (folder / "chart.svg").read_text("utf-8").count("<polyline") == 2


def test_the_custom_strategy_is_found_once_it_is_installed(tmp_path):
    """What pip writes for it is an entry point beside the module; the documentation shows the same module."""
    source = ROOT / "examples" / "custom_strategy"
    about = tmp_path / "ahead_strategy-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ahead-strategy\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text("[overlap_pass.strategies]\nahead = ahead:Ahead\n")
    (tmp_path / "ahead.py").write_text((source / "ahead.py").read_text("utf-8"))
    assert 'ahead = "ahead:Ahead"' in (source / "pyproject.toml").read_text("utf-8")
    program = (
        "from overlap_pass.registry import parse\nfrom overlap_pass.spec import spec\n"
        "print(spec(parse('ahead{ops=20}')), type(parse('ahead')).__module__)"
    )
    assert run("-c", program, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}").split() == ["ahead{ops=20}", "ahead"]


def test_a_trace_that_somebody_sent_is_summed_up(tmp_path):
    """60 µs, of which the gather is exposed for 40."""
    trace = Trace().kernel(NCCL, 1, 10, 50).kernel(GEMM, 2, 50, 70).write(tmp_path / "rank3.json")
    printed = run("examples/someone_elses_trace.py", str(trace))
    assert "rank 3, whole trace: 0.06 ms, of it 0.04 ms of exposed communication and 0.00 ms idle" in printed
    assert "all_gather of unknown module: 0.04 ms exposed" in printed
