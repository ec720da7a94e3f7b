"""Memory budgets: how they are written, what they mean in bytes, what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.errors import OptionError
from overlap_pass.graph.program import CollectiveKind, Phase, Program, Role
from overlap_pass.memory.budget import Absolute, Budget, Extra, Factor, Fsdp2, Unlimited
from tests.pure.programs import Builder

_EMPTY = Program("empty", Phase.FORWARD, (), ())
_GIB = 2**30


@pytest.mark.parametrize(
    ("written", "bound_bytes"),
    [
        ("60GiB", 60 * _GIB),
        (" 60 gib ", 60 * _GIB),
        ("1.5MiB", 3 * 2**19),
        (4096, 4096),
        (4096.0, 4096),
        ("+2GiB", 12 * _GIB),
        ("+0B", 10 * _GIB),
        ("1.0x", 10 * _GIB),
        ("0.5X", 5 * _GIB),
        ("2x", 20 * _GIB),
        ("unlimited", None),
        ("Unlimited", None),
    ],
)
def test_a_budget_is_resolved_against_a_peak_of_10_gib(written: str | int | float, bound_bytes: int | None) -> None:
    assert Budget.parse(written).resolve(_EMPTY, 10 * _GIB) == bound_bytes


@pytest.mark.parametrize(
    "written",
    ["", "lots", "-1", "-2GiB", "+-2GiB", "0B", "0GiB", "0x", "-1.5x", "60", "GiB", "+", "1.05", "nan", 0, -1, 0.5, True,
     float("nan"), float("inf"), [], {"bytes": 1}],
)  # fmt: skip
def test_what_is_no_budget_is_refused_by_the_options_name(written: object) -> None:
    with pytest.raises(OptionError, match="memory_budget=") as refused:
        Budget.parse(written)  # type: ignore[arg-type]
    assert "60GiB" in str(refused.value)  # shows how to write one


def test_the_default_is_what_eager_fsdp2_holds() -> None:
    assert Budget.parse(None) == Fsdp2() == Budget.parse("fsdp2") == Budget.parse("FSDP2")


def test_a_budget_object_passes_through() -> None:
    budget = Extra(7)
    assert Budget.parse(budget) is budget


def _units(*gathers: tuple[str | None, int]) -> Program:
    build = Builder()
    for number, (unit, size_bytes) in enumerate(gathers):
        shard = build.input(f"shard{number}", held=True)
        build.wait(f"w{number}", build.all_gather(f"g{number}", shard, size_bytes, unit=unit))
    return build.output()


def test_fsdp2_adds_the_two_largest_units_whole() -> None:
    program = _units(("a", 5), ("b", 7), ("a", 5), ("c", 1), ("b", 1))
    assert Fsdp2().resolve(program, 100) == 100 + (5 + 5) + (7 + 1)


def test_fsdp2_takes_gathers_of_no_known_unit_one_by_one() -> None:
    assert Fsdp2().resolve(_units((None, 5), (None, 7), (None, 6)), 100) == 100 + 7 + 6
    assert Fsdp2().resolve(_units((None, 5), ("a", 2), ("a", 2)), 100) == 100 + 5 + 4


def test_fsdp2_counts_parameter_gathers_only() -> None:
    build = Builder()
    x = build.input("x", 50)
    build.wait("activation", build.launch("a", x, CollectiveKind.ALL_GATHER, Role.ACTIVATION, size_bytes=100))
    build.wait("gradient", build.reduce_scatter("r", x, 25))
    assert Fsdp2().resolve(build.output(), 100) == 100


@given(
    st.builds(Absolute, st.integers(1, 2**50))
    | st.builds(Extra, st.integers(0, 2**50))
    | st.builds(Factor, st.floats(1e-9, 1e20))
    | st.just(Fsdp2())
    | st.just(Unlimited())
)
def test_a_budgets_spec_reads_back_as_the_same_budget(budget: Budget) -> None:
    assert Budget.parse(budget.spec) == budget


@pytest.mark.parametrize(
    ("written", "spec"), [("60GiB", "60GiB"), (1001, "1001B"), ("+1536MiB", "+1536MiB"), ("1.05x", "1.05x")]
)
def test_a_spec_says_it_in_the_largest_unit_that_is_exact(written: str | int, spec: str) -> None:
    assert Budget.parse(written).spec == spec
