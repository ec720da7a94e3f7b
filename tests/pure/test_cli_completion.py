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


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["pla"], ["plan"]),
        (["c"], ["calibrate", "compare", "completion"]),
        (["analyze", "--per"], ["--perfetto"]),
        (["plan", "--out"], ["--output"]),
        (["analyze", "ran"], ["rank0.json"]),
        (["plan", "--output", "ran"], ["rank0.json"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_commands_options_and_files(script, tmp_path, typed, offered):
    """What bash itself does on a tab: it puts the words into variables and calls the function that the script registers."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    (tmp_path / "rank0.json").touch()
    words = ["overlap-pass", *typed]
    press_tab = f"""
COMP_WORDS=({" ".join(words)})
COMP_CWORD={len(typed)}
registered=$(complete -p overlap-pass)
function=${{registered#*-F }}
${{function%% *}} overlap-pass {typed[-1]} {words[-2]}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    command = [bash, "--norc", "-c", f"{script}\n{press_tab}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.split()) == offered


def test_without_shtab_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(EnvironmentRefused, match=r"overlap-pass\[completion\]"):
        completion.run(argparse.Namespace(shell="bash"))
