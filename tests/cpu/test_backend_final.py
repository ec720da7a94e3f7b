"""Inductor and parameters in memory that the ranks share: what its code reads, when, and what it leaves alone.

As ``test_backend_order``: the code is generated for rank 0 of 2, and not run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from torch._inductor.virtualized import V

from compile_backends import lowerings
from overlap_pass.graph.program import Phase
from overlap_pass.memory import leases
from overlap_pass.memory.places import Place
from overlap_pass.schedule import alike, leasing
from tests.cpu.ranks import fake_ranks
from tests.cpu.test_backend_order import BF16, Compiled, code_tokens, compiled, llama, planned_tokens

SIZES: dict[str, str | int] = {"one launch a parameter": "off", "joined launches": 4096}
PHASES = (Phase.FORWARD, Phase.BACKWARD)

LAUNCHED = re.compile(r"(\w+) = torch\.ops\.overlap_pass\.gather_start\w*\.default\(.*\[([\d, ]+)\]\)$")
PICKED = re.compile(r"(\w+) = (\w+)(?:\[\d+\])?$")
SHAPED = re.compile(r"assert_size_stride\((\w+), \(([\d, ]+)\)")
WAITED = re.compile(r"torch\.ops\._c10d_functional\.wait_tensor\.default\(\w+\)$")
MULTIPLIED = re.compile(r"extern_kernels\.\w+\((.*), out=\w+\)$")


def generated(coalesce: str | int) -> Compiled:
    options = {"transport": "copy_engine", "reduction": "exchange", "coalesce": coalesce}
    with (
        fake_ranks(2),
        mock.patch.object(leases, "_LEAST_BYTES", 1),
        mock.patch.object(alike, "_WORTH_MEMORY", 0.0),
        mock.patch.object(leasing, "_PAYS", 0.0),
    ):
        return compiled(llama(3, mp_policy=BF16), **options)


@pytest.fixture(scope="module")
def found() -> dict[str, Compiled]:
    return {name: generated(coalesce) for name, coalesce in SIZES.items()}


@dataclass
class Final:
    """A parameter in shared memory.

    Attributes:
        start, end: its bytes there.
        launched: the line of code that gathers it.
        used: lines that name it, from then on, but for those that compute nothing.
    """

    start: int
    end: int
    launched: int
    used: dict[int, str]


def finals(code: str) -> dict[str, Final]:
    """By name of its buffer, in the order of launches."""
    lines = [line.strip() for line in code.splitlines()]
    size_bytes = {m[1]: 2 * math.prod(map(int, re.findall(r"\d+", m[2]))) for m in map(SHAPED.match, lines) if m}
    places: dict[str, tuple[int, Place]] = {}
    parts: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        if match := LAUNCHED.match(line):
            places[match[1]] = (number, Place.of(*map(int, match[2].split(","))))
        elif (match := PICKED.match(line)) and match[2] in places:
            parts.setdefault(match[2], []).append(match[1])
    known: dict[str, Final] = {}
    for launch, (number, place) in places.items():
        start = place.offset
        for part in (part for index, part in enumerate(parts[launch]) if place.is_final(index)):
            known[part] = Final(start, start + size_bytes[part], number, {})
            start += -(-size_bytes[part] // 256) * 256
    for number, line in enumerate(lines):
        if not line.startswith(("#", "assert_", "del ")) and not PICKED.match(line):
            for name in known.keys() & set(re.findall(r"\w+", line)):
                known[name].used[number] = line
    return known


def taken(code: str) -> dict[str, int]:
    """Parameters into whose bytes another is gathered later, with the line of the first that is."""
    known = finals(code)
    takers = {
        name: [
            other.launched
            for other in known.values()
            if other.launched > one.launched and other.start < one.end and one.start < other.end
        ]
        for name, one in known.items()
    }
    return {name: min(lines) for name, lines in takers.items() if lines}


def written(code: str) -> list[str]:
    """Lines that do anything else to a parameter in shared memory than wait for it and multiply by it."""
    lines = [line for one in finals(code).values() for line in one.used.values()]
    return [line for line in lines if not (WAITED.match(line) or MULTIPLIED.match(line))]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", SIZES)
def test_the_generated_code_runs_in_the_planned_order(case: str, phase: Phase, found: dict[str, Compiled]) -> None:
    _, plan, code = found[case].graph(phase)
    order = found[case].orders[found[case].plans.index(plan)]
    assert code_tokens(code) == planned_tokens(plan.program, order)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", SIZES)
def test_what_lies_in_shared_memory_is_multiplied_by_and_nothing_else(
    case: str, phase: Phase, found: dict[str, Compiled]
) -> None:
    _, plan, code = found[case].graph(phase)
    assert len(finals(code)) == sum(sum(lease.final) for lease in plan.program.leases.values()) > 0
    assert written(code) == []


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("case", SIZES)
def test_it_is_read_before_another_is_gathered_into_its_place(
    case: str, phase: Phase, found: dict[str, Compiled]
) -> None:
    _, _, code = found[case].graph(phase)
    known = finals(code)
    assert [name for name, line in taken(code).items() if max(known[name].used) > line] == []


def test_some_do_take_the_places_of_others(found: dict[str, Compiled]) -> None:
    assert len(taken(found["one launch a parameter"].graph(Phase.FORWARD)[2])) > 5


def test_inductor_is_told_whose_memory_that_is_and_who_writes_to_it() -> None:
    """It uses no buffer again that may not be aligned, as these are, and fuses nothing with these products: today."""
    graphs: list[Any] = []

    def noted(results: list[Any], place: Place) -> None:
        note_final(results, place)
        graphs.append(V.graph)

    note_final = lowerings._note_final
    with mock.patch.object(lowerings, "_note_final", noted):
        generated_now = generated("off")
    for phase, graph in zip(PHASES, dict.fromkeys(graphs), strict=True):
        _, _, code = generated_now.graph(phase)
        assert set(finals(code)) == graph.never_reuse_buffers
        outputs = (out for op in graph.operations for out in op.get_outputs())
        writes = Counter(name for out in outputs for name in out.get_mutation_names())
        assert {writes[name] for name in taken(code)} <= {2}  # by its wait, and by the launch of its successor
