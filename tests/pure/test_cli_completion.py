"""The completion scripts know every command, and are scripts."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from overlap_pass.cli import completion
from overlap_pass.cli.main import COMMANDS, main
from overlap_pass.errors import EnvironmentRefused


@pytest.fixture
def script(capsys):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_every_command_is_in_the_script(script):
    names = [module.__name__.rpartition(".")[2] for module in COMMANDS]
    assert not {name for name in names if name not in script}
    assert "--perfetto" in script


def test_bash_accepts_the_script(script):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    assert subprocess.run([bash, "-n"], input=script, text=True, check=False).returncode == 0


def test_without_shtab_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(EnvironmentRefused, match=r"overlap-pass\[completion\]"):
        completion.run(argparse.Namespace(shell="bash"))
