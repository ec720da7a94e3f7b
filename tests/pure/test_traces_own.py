"""Traces of our own runs, cut down by ``tests/bench/trim_trace.py``, against figures counted on a raster."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from overlap_pass.timeline.stats import measure
from overlap_pass.traces.capture import read_trace, timeline_of
from tests.bench import trim_trace
from tests.pure.drawn_traces import GEMM, NCCL, Trace
from tests.pure.raster import raster_figures, tolerance_us

FOLDER = Path(__file__).parents[1] / "data" / "traces"
FILES = sorted(FOLDER.glob("*.json.gz")) if FOLDER.exists() else []
MANIFEST: dict[str, Any] = json.loads((FOLDER / "MANIFEST.json").read_text()) if FILES else {}


def analysed(path: Path) -> dict[str, dict[str, float]]:
    """Our figures under the raster's names, of the steps that have a boundary on either side."""
    capture = read_trace(path)
    found = {}
    for step in capture.steps:
        if not step.partial:
            stats = measure(timeline_of(capture, step))
            names = ("step", "compute", "communication", "exposed", "exposed_copy", "idle")
            found[str(step.number)] = {f"{name}_us": getattr(stats, f"{name}_ns") / 1000 for name in names}
    return found


def assert_agree(path: Path, expected: dict[str, dict[str, float]]) -> None:
    found = analysed(path)
    assert set(found) == set(expected)
    for number, figures in expected.items():
        assert found[number] == pytest.approx(figures, abs=tolerance_us(path)), (path.name, number)


def drawn(folder: Path) -> Path:
    """Four steps of 1 ms: a matmul of 400 µs, beside and behind its second half a gather, then copies of 10 and 50 µs."""
    trace = Trace()
    for step in range(4):
        at = 1000 * step
        trace.cpu(f"ProfilerStep#{step}", at, at + 1000, cat="user_annotation")
        trace.cpu("/data/someone/code/train.py(7): step", at + 1, at + 900, cat="python_function")
        trace.cpu("/usr/lib/python3.11/contextlib.py(81): inner", at + 1, at + 900, cat="python_function")
        trace.kernel(GEMM, at + 10, at + 100, at + 500.125)
        trace.kernel(NCCL, at + 12, at + 300, at + 700.25, **{"Collective name": "allgather", "Seq": step})
        trace.kernel("Memcpy PtoP", None, at + 750, at + 760, stream=21)  # Kineto has no record of the driver's call
        trace.kernel("Memcpy DtoH", at + 14, at + 800, at + 850)
    return trace.write(folder / "whole.json", distributedInfo={"rank": 1, "world_size": 2, "hostname": "node7"})


@pytest.fixture
def trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    out = tmp_path / "out" / "rank1.json.gz"
    monkeypatch.setattr(sys, "argv", ["trim_trace", str(drawn(tmp_path)), str(out), "--what", "drawn"])
    trim_trace.main()
    return out


@pytest.mark.skipif(not FILES, reason="no traces of our own in tests/data/traces yet")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_figures_agree_with_those_counted_on_a_raster(path: Path) -> None:
    about = MANIFEST[path.name]
    assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256"]
    assert about["steps"]
    assert raster_figures(path) == about["steps"]
    assert_agree(path, about["steps"])


@pytest.mark.skipif(not FILES, reason="no traces of our own in tests/data/traces yet")
def test_test_data_are_small_and_name_no_host() -> None:
    assert set(MANIFEST) == {path.name for path in FILES}
    assert sum(path.stat().st_size for path in FILES) < 8_000_000
    for path in FILES:
        assert path.stat().st_size < 1_000_000
        assert not any(
            word in gzip.decompress(path.read_bytes()) for word in (b"/home/", b"/root/", b"/tmp/", b"/usr/")
        )


def test_a_trimmed_trace_keeps_two_steps_and_their_figures(tmp_path: Path, trimmed: Path) -> None:
    """Each step of the device lasts 1000 µs: 400.125 of matmul, 400.25 of gather of which 200.125 exposed,
    10 of copies among devices, 50 of others."""
    expected = {"step_us": 1000, "compute_us": 400.1, "communication_us": 410.2, "exposed_us": 210.1}
    expected |= {"exposed_copy_us": 50, "idle_us": 339.8}
    figures = raster_figures(trimmed)
    assert list(figures) == ["2"]
    assert figures["2"] == pytest.approx(expected, abs=0.21)
    assert_agree(trimmed, figures)
    whole = analysed(tmp_path / "whole.json")
    assert analysed(trimmed) == {"2": whole["2"]}


def test_a_trimmed_trace_names_no_host_and_no_folder(trimmed: Path) -> None:
    text = gzip.decompress(trimmed.read_bytes()).decode()
    assert "train.py(7): step" in text
    assert not any(word in text for word in ("someone", "/data", "/usr", "node7", "contextlib"))
    assert json.loads(text)["distributedInfo"] == {"rank": 1, "world_size": 2}


def test_the_manifest_holds_what_the_raster_counts(trimmed: Path) -> None:
    entry = json.loads((trimmed.parent / "MANIFEST.json").read_text())[trimmed.name]
    assert entry["what"] == "drawn"
    assert entry["steps"] == raster_figures(trimmed)


def test_trimming_twice_gives_the_same_bytes(trimmed: Path) -> None:
    before = trimmed.read_bytes()
    trim_trace.main()
    assert trimmed.read_bytes() == before
