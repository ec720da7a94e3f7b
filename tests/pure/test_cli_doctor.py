"""``doctor`` names what is missing and what to do about it."""

from __future__ import annotations

import argparse
import json
from importlib import metadata

import pytest

from overlap_pass.cli import doctor
from overlap_pass.cli.doctor import Finding


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed."""

    def pretend(**versions: str) -> None:
        def version(name: str) -> str:
            try:
                return versions[name]
            except KeyError:
                raise metadata.PackageNotFoundError(name) from None

        monkeypatch.setattr(metadata, "version", version)

    return pretend


def test_an_old_python_is_named():
    assert doctor.examine_python((3, 10, 4)) == Finding(
        "python", "failed", "3.10.4 is too old: use Python 3.11 or newer"
    )
    assert doctor.examine_python((3, 11, 0)).state == "ok"


@pytest.mark.parametrize(
    ("found", "state"),
    [("2.10.1", "failed"), ("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("3.0", "ok"), ("2.9.1", "failed")],
)
def test_versions_are_compared_as_numbers_and_without_the_build(installed, found, state):
    installed(torch=found)
    assert doctor.examine_package("torch", (2, 11)).state == state


def test_a_torch_that_nobody_has_tested_works_as_far_as_anyone_knows_and_is_named(installed):
    installed(torch="2.14.1", numpy="2.14.1")
    finding = doctor.examine_package("torch", (2, 11))
    assert (finding.state, finding.detail) == ("ok", "2.14.1, newer than any that was tested (up to 2.13)")
    assert doctor.examine_package("numpy", (1, 26)).detail == "2.14.1"


def test_a_package_that_is_not_there_comes_with_the_command_that_installs_it(installed):
    installed()
    assert doctor.examine_package("torch", (2, 11)) == Finding(
        "torch", "failed", "not installed: pip install 'torch>=2.11'"
    )


def test_a_backend_that_is_not_registered_is_named(monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    finding = doctor.examine_backend("overlap")
    assert (finding.name, finding.state) == ("backend overlap", "failed")
    assert "pip install overlap-pass" in finding.detail


def test_a_backend_that_another_package_claims_is_named(monkeypatch):
    stranger = metadata.EntryPoint("overlap", "elsewhere:overlap", "torch_dynamo_backends")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [stranger])
    assert doctor.examine_backend("overlap").state == "failed"


def test_this_installation_registers_both_backends():
    for name in doctor.BACKENDS:
        assert doctor.examine_backend(name) == Finding(f"backend {name}", "ok", f"compile_backends.overlap:{name}")


def test_a_single_hardware_queue_is_a_failure():
    assert doctor.examine_connections("1").state == "failed"
    assert doctor.examine_connections(None).state == "ok"
    assert doctor.examine_connections("8").detail == "8"


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("optional", 0), ("failed", 1)])
def test_only_a_failure_gives_exit_code_1(monkeypatch, capsys, state, code):
    monkeypatch.setattr(doctor, "examine", lambda: iter([Finding("python", "ok", "3.11"), Finding("x", state, "y")]))
    assert doctor.run(argparse.Namespace(json=True)) == code
    assert json.loads(capsys.readouterr().out)[1] == {"name": "x", "state": state, "detail": "y"}
    assert doctor.run(argparse.Namespace(json=False)) == code
    assert capsys.readouterr().out.splitlines()[0] == "ok        python  3.11"


@pytest.mark.parametrize(
    ("reachable", "pairs", "state"), [(2, 2, "ok"), (1, 2, "optional"), (0, 0, "optional"), (56, 56, "ok")]
)
def test_copy_engines_need_every_pair_of_gpus(reachable, pairs, state, monkeypatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert doctor.examine_peers(reachable, pairs).state == state


def test_copy_engines_are_not_used_where_access_is_forbidden(monkeypatch) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert doctor.examine_peers(2, 2).state == "optional"
