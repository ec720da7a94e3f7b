"""What every test runs under: one thread each, reproducible properties, and golden files that can be accepted."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Before anything imports torch: ranks and workers share few cores, and many threads on one core only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run and machine, and no deadline: a busy machine is no failure.
settings.register_profile("reproducible", deadline=None, derandomize=True)
settings.load_profile("reproducible")

GPUS_NEEDED = {"test_one_gpu.py": 1}
"""By file under ``tests/gpu``; the others need two."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="accept what is printed now as the golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests under ``tests/gpu`` are skipped where their GPUs are not at hand; where nothing is left to run, one line says so."""
    on_gpu = [item for item in items if "gpu" in Path(item.path).relative_to(config.rootpath).parts]
    if not on_gpu:
        return
    reasons = {item: _no_gpus(GPUS_NEEDED.get(Path(item.path).name, 2)) for item in on_gpu}
    if on_gpu == items and all(reasons.values()):
        pytest.exit(f"nothing was run: tests/gpu {min(reasons.values())}", returncode=0)
    for item, reason in reasons.items():
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpus(needed: int) -> str:
    if importlib.util.find_spec("torch") is None:
        return "needs torch, which is not installed"
    import torch

    count = torch.cuda.device_count()
    return "" if count >= needed else f"needs {needed} CUDA devices, found {count}"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compares a text with a file; ``pytest --update-golden`` writes the file instead."""

    def check(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        assert text == expected, f"differs from {path.name}; if the new text is right: pytest --update-golden"

    return check
