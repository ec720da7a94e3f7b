"""Dependencies keep their kinds: an ordering edge never takes a data edge's place, and an effect holds what it must and no more."""

from __future__ import annotations

import networkx as nx
import pytest

from overlap_pass.graph.dag import EdgeKind, build_dag
from overlap_pass.graph.program import CollectiveKind, Role
from overlap_pass.schedule.coalescing import groups_of
from tests.pure.programs import Builder


def test_a_pair_that_is_ordered_for_several_reasons_has_all_of_them() -> None:
    """Two activation collectives, the second of what the first returned, both random besides: data, order and draws."""
    build = Builder()
    first = build.compute("first", build.input("x", 8), size_bytes=8, random=True)
    second = build.compute("second", first, size_bytes=8, random=True)
    changed = build.in_place("changed", second)
    program = build.output(changed)
    dag = build_dag(program)
    assert dag.kinds("first", "second") == {EdgeKind.DATA, EdgeKind.RANDOM}
    assert dag.kinds("second", "changed") == {EdgeKind.DATA, EdgeKind.MUTATION}
    assert dag.kinds("first", "changed") == frozenset()


def test_effects_order_what_has_effects_and_leave_compute_alone() -> None:
    build = Builder()
    x = build.input("x", 8)
    one = build.compute("one", x, opaque=True)
    plain = build.compute("plain", x)
    gather = build.all_gather("gather", build.input("shard", 4), 8)
    two = build.compute("two", x, opaque=True)
    dag = build_dag(build.output(one, plain, two, build.wait("wait", gather)))
    assert dag.kinds("one", "two") == dag.kinds("one", "gather") == dag.kinds("gather", "two") == {EdgeKind.EFFECT}
    assert dag.kinds("two", "wait") == {EdgeKind.EFFECT}
    assert dag.kinds("one", "plain") == dag.kinds("plain", "two") == frozenset()


def test_the_graph_cannot_be_changed() -> None:
    dag = build_dag(Builder().output())
    with pytest.raises(nx.NetworkXError):
        dag.graph.add_edge("a", "b")


def test_collectives_that_depend_on_each_other_are_never_joined() -> None:
    """A parameter sharded twice is gathered over its shards and then over these: alike, and one behind the other."""
    build = Builder()
    shard = build.input("shard", 4, held=True)
    inner = build.wait("inner_wait", build.all_gather("inner", shard, 8, unit="unit"))
    outer = build.launch("outer", inner, CollectiveKind.ALL_GATHER, Role.PARAMETER, size_bytes=16)
    other = build.all_gather("other", build.input("next", 4, held=True), 8, unit="unit")
    weight, second = build.wait("outer_wait", outer), build.wait("other_wait", other)
    program = build.output(build.compute("mm", weight, second))
    joined = [group.members for across in (False, True) for group in groups_of(program, 2**40, across=across)]
    assert joined == [("inner", "other"), ("inner", "other")]
