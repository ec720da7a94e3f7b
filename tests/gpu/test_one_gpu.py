"""On one GPU that all ranks share: copies, their words, and recorded graphs are as among peers (``tests.gpu.small_llama``).

What runs over gloo here is eager FSDP2 alone, which everything is held against; torch's functional collectives over gloo end
with CUDA tensors in a segmentation fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import pytest

from overlap_pass.memory import leases
from overlap_pass.profiling.plans import recorded_plans
from overlap_pass.schedule import alike, leasing
from tests.cpu.ranks import Outcome, run_cases
from tests.gpu.across_steps import side_by_side as across_steps
from tests.gpu.test_two_gpus import BF16, COPIES, GRAPHS, eager_against_fsdp2, side_by_side

EXCHANGE = COPIES | {"reduction": "exchange"}
STAGED = {"final_places": "off"}


def in_final_places(steps: int, *both: dict[str, str]) -> list[str]:
    """What differs between two models, of which the second gathers whatever it can into shared memory, however small."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with (
        mock.patch.object(leases, "_LEAST_BYTES", 1),
        mock.patch.object(alike, "_WORTH_MEMORY", 0.0),
        mock.patch.object(leasing, "_PAYS", 0.0),
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        recorded_plans() as plans,
    ):
        found = side_by_side("overlap", steps, *both)
    final = [sum(sum(lease.final) for lease in plan.program.leases.values()) for plan in plans]
    return found if len(final) == 4 and not any(final[:2]) and any(final[2:]) else [*found, f"final places: {final}"]


EDGES = (
    "eager, whatever carries by default",
    "inductor, whatever carries by default",
    "inductor, with its backward",
)
TWO: Mapping[str, Callable[[], Any]] = {
    "eager": partial(eager_against_fsdp2, BF16),
    "recorded": partial(side_by_side, "overlap", 20, COPIES, COPIES | GRAPHS),
    "final places": partial(in_final_places, 20, COPIES | STAGED, COPIES),
    "final places, recorded": partial(in_final_places, 20, COPIES | STAGED, COPIES | GRAPHS),
    **{name: partial(across_steps, name, "cuda", 20) for name in EDGES},
}
FOUR: Mapping[str, Callable[[], Any]] = {
    "recorded": partial(side_by_side, "overlap", 10, EXCHANGE, EXCHANGE | GRAPHS),
    "final places, recorded": partial(in_final_places, 10, EXCHANGE | STAGED, EXCHANGE | GRAPHS),
}


@pytest.fixture(scope="module")
def of_two() -> dict[str, Outcome]:
    return run_cases(TWO, ranks=2, limit_s=400)


def test_losses_and_gradients_by_copies_are_those_of_eager_fsdp2(of_two: dict[str, Outcome]) -> None:
    assert of_two["eager"].values() == ([], [])


def test_recorded_copies_give_the_bits_of_unrecorded_ones_in_every_step(of_two: dict[str, Outcome]) -> None:
    assert of_two["recorded"].values() == ([], [])


@pytest.mark.parametrize("case", ["final places", "final places, recorded"])
def test_parameters_in_shared_memory_change_no_bit(of_two: dict[str, Outcome], case: str) -> None:
    assert of_two[case].values() == ([], [])


@pytest.mark.parametrize("name", EDGES)
def test_what_crosses_the_edge_between_steps_changes_no_bit(of_two: dict[str, Outcome], name: str) -> None:
    for row in of_two[name].values():
        assert row.differing == 0
        assert row.taken >= row.steps - 1
        assert row.fills


@pytest.fixture(scope="module")
def of_four() -> dict[str, Outcome]:
    return run_cases(FOUR, ranks=4, limit_s=400)


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks_that_copy_from_one_another_repeat_their_bits(of_four: dict[str, Outcome], case: str) -> None:
    assert of_four[case].values() == ([], [], [], [])
