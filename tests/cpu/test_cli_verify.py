"""``overlap-pass verify`` where it cannot run, and with input that it cannot use: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlap_pass.cli.main import main
from overlap_pass.errors import OptionError
from overlap_pass.profiling.variants import BASELINES, baselines
from overlap_pass.profiling.workload import load_make_step

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "llama.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_it_says_so_and_what_to_do(capsys) -> None:
    assert main(["verify", f"{EXAMPLE}:make_step"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "no CUDA device" in lines[0]
    assert "demo" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py:make_step"], "there is no file 'nowhere.py'"),
        ([EXAMPLE], "is no step: write path/to/train.py:function"),
        ([f"{EXAMPLE}:make_stp"], "defines no function 'make_stp'"),
        ([f"{EXAMPLE}:make_step", "--against", "fsdp3"], "against='fsdp3' is unknown: did you mean 'fsdp2'?"),
        ([f"{EXAMPLE}:make_step", "--against", ","], "names nothing"),
        ([f"{EXAMPLE}:make_step", "--against", "compute-only"], "names nothing to compare with"),
        ([f"{EXAMPLE}:make_step", "--set", "tokens"], "--set 'tokens' is no NAME=VALUE"),
        ([f"{EXAMPLE}:make_step", "--option", "coalesced=off"], "unknown option 'coalesced'"),
        ([f"{EXAMPLE}:make_step", "--rounds", "1"], "--rounds=1 is too small: at least 2"),
        ([f"{EXAMPLE}:make_step", "--output", "page.png"], "--output=page.png must end in .html"),
        ([f"{EXAMPLE}:make_step", "--record", "no/such/folder/a.json"], "the folder"),
        ([f"{EXAMPLE}:make_step", "--output", "page.html", "--profiled", "0"], "--profiled=0 takes none"),
    ],
)
def test_input_that_cannot_be_used_is_named_in_one_line(capsys, arguments, message) -> None:
    assert main(["verify", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_baselines_are_found_by_name_each_once() -> None:
    assert [variant.name for variant in baselines("fsdp2, as-written,fsdp2")] == ["fsdp2", "as-written"]
    assert set(BASELINES) == {
        "as-written",
        "fsdp2",
        "fsdp2-compile",
        "torch-overlap",
        "torch-manual",
        "compute-only",
    }


def test_arguments_reach_the_users_function(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def make_step(tokens=1):\n    return None, None, (tokens,)\n")
    assert load_make_step(f"{script}:make_step", {"tokens": 7})()[2] == (7,)


@pytest.mark.parametrize("content", ["def make_step(:\n", "import there_is_no_such_module\n", "1 / 0\n"])
def test_a_script_that_cannot_be_loaded_is_named(tmp_path, content) -> None:
    script = tmp_path / "train.py"
    script.write_text(content)
    with pytest.raises(OptionError, match=r"train\.py' cannot be loaded"):
        load_make_step(f"{script}:make_step")
