"""What a user gets from pip: the packages whole, nothing else, and a command line that answers before torch is there."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.checks.sources import ROOT, project

builders = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed: pip install -e '.[dev]'")
PACKAGES = ("compile_backends", "overlap_pass")
SHIPPED = {
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    [built] = builders.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return Path(built)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The wheel's files where pip would put them, and nothing else beside them."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def alone(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with this project and its own library only."""
    environment = {"PYTHONPATH": str(installed), "PATH": os.environ.get("PATH", "")}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_holds_both_packages_whole_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == SHIPPED


def test_the_wheel_says_what_it_is_and_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    about = email.message_from_bytes(
        archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA")))
    )
    assert set(about.get_all("Provides-Extra")) == set(project()["project"]["optional-dependencies"])
    needs = {text.partition(">")[0].strip() for text in about.get_all("Requires-Dist") if "extra ==" not in text}
    assert needs == {"networkx", "numpy", "rich", "torch"}
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(
        about.get_all("Classifier")
    )
    assert about["License-Expression"] == "Apache-2.0"
    entries = archive.read(next(name for name in archive.namelist() if name.endswith("/entry_points.txt"))).decode()
    assert "overlap-pass = overlap_pass.cli.main:main" in entries
    assert "overlap = compile_backends.overlap:overlap" in entries


def test_the_source_archive_has_what_the_tests_need(tmp_path):
    from hatchling.builders.sdist import SdistBuilder

    [built] = SdistBuilder(str(ROOT)).build(directory=str(tmp_path))
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= SHIPPED
    needed = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "requirements-ci.txt", "mkdocs.yml"}
    assert names >= needed | {".ci/run", "tests/conftest.py", "examples/plain.py", "docs/index.md"}
    assert [name for name in names if "cache" in name.rpartition("/")[0] or name.endswith(".pyc")] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["analyze", "--help"], ["verify", "--help"]])
def test_the_command_line_says_its_help_with_nothing_else_installed(installed, arguments):
    done = alone(installed, "-m", "overlap_pass", *arguments)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_imports_nothing_but_pythons_library(installed):
    """What it takes is then Python's own: thousandths of a second, where torch takes seconds."""
    program = "import sys; before = set(sys.modules); import overlap_pass; print(*sorted(set(sys.modules) - before))"
    done = alone(installed, "-c", program)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "overlap_pass" in loaded
    assert loaded - {"overlap_pass"} <= sys.stdlib_module_names


def test_doctor_names_torch_when_it_is_not_there(installed):
    done = alone(installed, "-m", "overlap_pass", "doctor")
    assert done.returncode == 1
    assert "pip install 'torch>=2.11'" in done.stdout
