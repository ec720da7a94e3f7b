"""The example scripts run as they are told to in their docstrings."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.checks.sources import ROOT


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_llama_trains_on_two_cpu_processes():
    done = torchrun("examples/llama.py", "--backend", "overlap_eager", "--steps", "3")
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+), [\d.]+ ms$", done.stdout, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[2] < losses[1] < losses[0]
