"""The package is light until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import overlap_pass

PROGRAM = """
import sys, overlap_pass
assert overlap_pass.__version__ == "0.1.0"
assert "make_traceable" in dir(overlap_pass)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "networkx", "numpy")))
"""


def test_importing_the_package_imports_no_torch() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"


def test_public_names_are_loaded_when_they_are_used() -> None:
    from overlap_pass.fsdp import convert

    assert overlap_pass.make_traceable is convert.make_traceable
    assert overlap_pass.restore is convert.restore
    assert overlap_pass.is_traceable is convert.is_traceable


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'overlap_pass' has no attribute 'make_tracable'"):
        _ = overlap_pass.make_tracable
