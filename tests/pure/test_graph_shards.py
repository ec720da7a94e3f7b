"""Ranks that hold shards of different sizes read the same program; each test is one parameter of seven rows of two on two
ranks: the first holds four rows, the second three and pads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overlap_pass.graph.program import Category, OpKind, Program
from overlap_pass.graph.shards import Extent, on_the_largest_rank
from overlap_pass.memory.ledger import peak
from tests.pure.programs import Builder

PAD = "aten.constant_pad_nd.default"
FULL, SHORT = 4 * 2, 3 * 2


def read(build: Builder, result: str, elements: dict[str, int], padded: set[str] = frozenset()) -> Program:
    """The program as the reader would make it of a rank's graph, of 4-byte elements."""
    program = build.output(result)
    ops = [replace(op, target=PAD) if op.name == "pad" else op for op in program.ops]
    extents = {name: Extent(elements.get(name, 0), 4) for name in program.order}
    ops, storages = on_the_largest_rank(ops, program.storages, extents, padded)
    return replace(program, ops=ops, storages=storages)


def gathers(shard: int, *, pads: bool, padded: bool, cast: bool = False) -> Program:
    """shard ─ (cast) ─ (pad) ─ gather ─ weight ─ y"""
    build, elements = Builder(), {"shard": shard, "cast": shard, "pad": FULL, "gather": 2 * FULL, "weight": 2 * FULL}
    sent = build.input("shard", shard * 4, held=True)
    if cast:
        sent = build.cast("cast", sent, shard * 4)
    if pads:
        sent = build.compute("pad", sent, size_bytes=FULL * 4, category=Category.COPY)
    weight = build.wait("weight", build.all_gather("gather", sent, 2 * FULL * 4))
    return read(build, build.compute("y", weight, size_bytes=4), elements, {"gather"} if padded else set())


def reduces(shard: int) -> Program:
    """gradient ─ reduction ─ wait ─ slice ─ cast ─ output"""
    build = Builder()
    gradient = build.compute("gradient", build.input("x", 4), size_bytes=2 * FULL * 4)
    wait = build.wait("wait", build.reduce_scatter("reduction", gradient, FULL * 4))
    cast = build.cast("cast", build.view("slice", wait), shard * 4)
    elements = {"gradient": 2 * FULL, "reduction": FULL, "wait": FULL, "slice": shard, "cast": shard}
    return read(build, cast, elements)


def sizes(program: Program) -> dict[str, int]:
    """Bytes that each op allocates, nothing for the others."""
    found: dict[str, int] = {}
    for storage in program.storages:
        found[storage.owner] = found.get(storage.owner, 0) + storage.size_bytes
    return {name: size_bytes for name, size_bytes in found.items() if size_bytes}


def test_a_shard_counts_as_the_largest_rank_holds_it() -> None:
    assert sizes(gathers(SHORT, pads=True, padded=True))["shard"] == FULL * 4


@pytest.mark.parametrize("cast", [False, True], ids=["sent as it is", "cast"])
def test_a_rank_that_pads_reads_what_a_rank_reads_whose_pad_was_dropped(cast: bool) -> None:
    short = gathers(SHORT, pads=True, padded=True, cast=cast)
    full = gathers(FULL, pads=False, padded=True, cast=cast)
    assert sizes(short) == sizes(full)
    assert peak(short).peak_bytes == peak(full).peak_bytes
    traffic = {op.name: (op.read_bytes, op.written_bytes) for op in full.ops}
    assert {op.name: (op.read_bytes, op.written_bytes) for op in short.ops if op.name != "pad"} == traffic


def test_a_pad_is_a_view_and_its_copy_is_the_launchs() -> None:
    program = gathers(SHORT, pads=True, padded=False)
    assert program.op("pad").kind is OpKind.VIEW
    assert sizes(program)["gather"] == (2 * FULL + FULL) * 4


def test_the_padded_copy_is_free_again_behind_the_wait() -> None:
    program = gathers(SHORT, pads=True, padded=False)
    live = dict(zip(program.order, peak(program).live_bytes, strict=True))
    assert live["weight"] - live["y"] == FULL * 4 - sizes(program)["y"]


def test_a_cast_is_copy_enough() -> None:
    assert sizes(gathers(FULL, pads=False, padded=True, cast=True))["gather"] == 2 * FULL * 4


def test_a_shard_that_no_rank_pads_is_left_alone() -> None:
    assert sizes(gathers(FULL, pads=False, padded=False)) == {"shard": FULL * 4, "gather": 2 * FULL * 4, "y": 4}


def test_a_rank_without_a_row_reads_the_same() -> None:
    assert sizes(gathers(0, pads=True, padded=True)) == sizes(gathers(FULL, pads=False, padded=True))


def test_a_gradient_counts_as_the_largest_rank_gets_it() -> None:
    short, full = reduces(SHORT), reduces(FULL)
    assert sizes(short) == sizes(full)
    assert short.op("cast").written_bytes == full.op("cast").written_bytes == FULL * 4


def test_a_part_of_something_larger_is_no_shard() -> None:
    """A flat buffer of which a slice is gathered keeps its size."""
    build = Builder()
    buffer = build.input("buffer", 100 * 4, held=True)
    weight = build.wait("weight", build.all_gather("gather", build.view("part", buffer), 2 * FULL * 4))
    elements = {"buffer": 100, "part": FULL, "gather": 2 * FULL, "weight": 2 * FULL}
    assert sizes(read(build, build.compute("y", weight, size_bytes=4), elements))["buffer"] == 100 * 4


def test_what_the_graph_is_given_and_does_not_read_counts_nothing() -> None:
    build = Builder()
    build.input("unused", SHORT * 4, held=True)
    x = build.input("x", 4, held=True)
    assert sizes(read(build, build.compute("y", x, size_bytes=4), {})) == {"x": 4, "y": 4}
