"""The planner runs where torch is not installed.

The import contract sees import statements; a package's ``__init__`` can break the rule where it does not look. So every
module of the contract is imported here in a process in which torch cannot be.
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.checks.sources import ROOT, project

PROGRAM = """
import importlib, json, pkgutil, sys

sys.modules["torch"] = None
names = []
for name in json.loads(sys.argv[1]):
    module = importlib.import_module(name)
    names.append(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(found.name)
        names.append(found.name)
print(json.dumps(names))
"""


def torch_free_modules() -> list[str]:
    contracts = project()["tool"]["importlinter"]["contracts"]
    return next(
        contract["source_modules"] for contract in contracts if "torch" in contract.get("forbidden_modules", ())
    )


def run_without_torch(modules: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(modules)], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_module_of_the_contract_is_imported_without_torch():
    done = run_without_torch(torch_free_modules())
    assert done.returncode == 0, done.stderr
    assert {"overlap_pass.schedule.types", "overlap_pass.cost.model"} <= set(json.loads(done.stdout))


def test_the_package_and_the_command_line_are_imported_without_torch():
    done = run_without_torch(["overlap_pass.cli.main"])
    assert done.returncode == 0, done.stderr


def test_a_module_that_needs_torch_would_be_noticed():
    assert "torch" in run_without_torch(["overlap_pass.profiling.llama"]).stderr


def test_mypy_is_strict_in_every_room_of_the_contract():
    """Two lists name the torch-free rooms; a room that joins one joins the other."""
    checked = {name.removesuffix(".py").replace("/", ".") for name in project()["tool"]["mypy"]["files"]}
    assert set(torch_free_modules()) <= checked
