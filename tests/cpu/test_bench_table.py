"""The table of docs/results, made from records."""

from __future__ import annotations

import json

from tests.bench import predict
from tests.bench.h200 import SYSTEMS, options, parser, table, variants

STEP = {
    "step_median_us": 104_700.0,
    "step_interval_us": {"low": 104_200.0, "high": 105_100.0},
    "peak_bytes": 10 * 2**30,
}


def record(tokens: int, *names: str, failed: tuple[str, ...] = ()) -> dict:
    return {
        "case": {"model": "bench-2b", "tokens": tokens, "transport": "nvlink", "ranks": 2},
        "verification": {
            "systems": [{"name": name, **STEP} for name in names],
            "left_out": [{"name": name, "reason": "why"} for name in failed],
        },
    }


def test_cases_are_columns_and_systems_are_rows() -> None:
    lines = table([record(1024, "fsdp2", failed=("torch-overlap",)), record(4096, "fsdp2", "overlap")]).splitlines()
    assert lines[0] == "| system | bench-2b, T=1024, nvlink, 2 ranks | bench-2b, T=4096, nvlink, 2 ranks |"
    assert lines[2:] == [
        "| fsdp2 | 104.7 (104.2–105.1), 10.0 GiB | 104.7 (104.2–105.1), 10.0 GiB |",
        "| torch-overlap | failed | – |",
        "| overlap | – | 104.7 (104.2–105.1), 10.0 GiB |",
    ]


def test_of_a_case_measured_twice_the_later_figures_stand() -> None:
    later = record(1024, "fsdp2")
    later["verification"]["systems"][0]["step_median_us"] = 99_000.0
    assert "| fsdp2 | 99.0 " in table([record(1024, "fsdp2"), later])


def test_several_sets_of_options_are_several_rows() -> None:
    args = parser().parse_args(
        ["--tokens", "1024,4096", "--ours", "", "--ours", "coalesce=off;strategy=greedy{window=2}"]
    )
    assert args.tokens == (1024, 4096)
    ours = [options(text) for text in args.ours]
    assert ours == [{}, {"coalesce": "off", "strategy": "greedy{window=2}"}]
    names = [variant.name for variant in variants(args.systems, ours)]
    assert names == [*SYSTEMS.split(","), "overlap", "overlap; coalesce=off; strategy=greedy{window=2}"]


def test_predictions_are_recorded_with_their_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(predict, "CASES", (predict.Case("tiny", 64), predict.Case("tiny", 64, replicas=2)))
    record = tmp_path / "predicted.json"
    assert predict.main(["--world", "4", "--record", str(record)]) == 0
    found = json.loads(record.read_text())
    assert found["command"] == "python -m tests.bench.predict --world 4 --hardware h200"
    one, two = (case["predicted"] for case in found["cases"])
    assert two["step_us"] > one["step_us"], "replicas reduce twice"
    assert one["compute_us"] + one["exposed_us"] <= one["step_us"]
    assert "| tiny | 64 | 2 |" in capsys.readouterr().out
