"""Events laid out as Kineto lays them out are read without parsing: what comes out is what the parser would have given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.traces.chrome import read_file
from overlap_pass.traces.reader import Reader
from overlap_pass.traces.records import TraceFile

CATEGORIES = [
    "cpu_op",
    "user_annotation",
    "cuda_runtime",
    "cuda_driver",
    "kernel",
    "gpu_memcpy",
    "gpu_user_annotation",
    "python_function",
    "Kernel",
    "Operator",
    "Trace",
    "cuda_sync",
]
NAMES = [
    "aten::mm",
    "ProfilerStep#3",
    "nccl:all_gather",
    "train.py(3): step",
    "torch/nn.py(1): f",
    'a "b" \\ c',
    "µ-kernel<int>",
    "",
]
TIMES = st.one_of(
    st.integers(0, 2**52).map(str),
    st.integers(0, 2**52).flatmap(lambda us: st.integers(0, 999).map(lambda ns: f"{us}.{ns:03}")),
    st.integers(0, 999).map(lambda us: f"{us}.5"),
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "External id": st.integers(0, 9),
        "device": st.integers(0, 7),
        "context": st.just(1),
        "stream": st.integers(0, 30),
        "correlation": st.integers(0, 2**33),
        "grid": st.lists(st.integers(1, 99), min_size=3, max_size=3),
        "Collective name": st.just("allgather"),
        "note": st.sampled_from(['"device": 5, "stream": 6', "}, {"]),
    },
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(CATEGORIES),
        st.sampled_from(NAMES),
        st.sampled_from([0, 7, -1, "Spans", "stream 7"]),
        TIMES,
        TIMES,
        ARGUMENTS,
    ),
    max_size=8,
)


def texts(events: list[tuple[Any, ...]]) -> list[str]:
    """As a file has them, each without its last brace."""
    return [
        f' {{\n "ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": 4, "tid": {json.dumps(tid)},\n "ts": {start}, '
        f'"dur": {length},\n "args": {json.dumps(args)} '
        for cat, name, tid, start, length, args in events
    ]


def parsed_only(written: list[str]) -> TraceFile:
    reader = Reader(TraceFile("parsed"))
    reader.add(json.loads(text + "}", parse_float=str) for text in written)
    return reader.file


def comparable(file: TraceFile) -> dict[str, Any]:
    """What a file holds, in one order; a thread of which nothing is kept (calls too short to matter) is as none."""

    def rows(columns: Any) -> list[tuple[int, int, str]]:
        return sorted(
            (start, end, file.names[name])
            for start, end, name in zip(columns.starts_ns, columns.ends_ns, columns.names, strict=True)
        )

    def everything(thread: Any) -> tuple[list[Any], ...]:
        return rows(thread.ops), rows(thread.calls), sorted(thread.correlations), rows(thread.frames)

    return {
        "device": sorted(file.device, key=str),
        "threads": {place: held for place, thread in file.threads.items() if any(held := everything(thread))},
        "ranges": {file.names[number] for number in file.ranges},
        "marks": sorted(file.marks, key=str),
    }


@given(EVENTS)
def test_what_is_taken_from_the_text_is_what_the_parser_gives(events: list[tuple[Any, ...]]) -> None:
    written = texts(events)
    reader = Reader(TraceFile("taken"))
    rest = reader.take(written)
    reader.add(json.loads(text + "}", parse_float=str) for text in rest)
    assert comparable(reader.file) == comparable(parsed_only(written))


def test_most_of_a_file_is_taken(tmp_path: Path) -> None:
    """Or the test above would hold for a reader that takes nothing."""
    events = [
        (cat, "aten::mm", 7, "12.345", "1.000", {"device": 0, "stream": 7, "correlation": 3}) for cat in CATEGORIES
    ]
    assert Reader(TraceFile("taken")).take(texts(events)) == []


@pytest.mark.parametrize("tid", ['"\\u0037"', "07", '{"a": 1}', "[1, 2]"])
def test_a_thread_that_is_no_number_or_name_does_no_harm(tmp_path: Path, tid: str) -> None:
    event = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 4, "tid": TID, "ts": 1, "dur": 2, "args": {}}'
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents": [' + event.replace("TID", tid) + "]}")
    file = read_file(path)
    assert file.seen + file.unreadable == 1
