"""Other carriers, the same numbers: gathers and reductions as copies or exchanges, against eager FSDP2 on two gloo ranks.

Off CUDA the operators of copy engines run on ordinary collectives, so graphs, orders, memory and numbers are those of a
machine with them; what only a GPU can show (streams, staging memory, words) is in ``tests/gpu``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import compile_backends.overlap as backends
from compile_backends import compilation
from overlap_pass.planning import Plan
from tests.cpu.models import TinyLlamaConfig, sharded_llama
from tests.cpu.ranks import Outcome, run_cases
from tests.cpu.training import Recipe, compare

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
COPY = {"transport": "copy_engine"}
EXCHANGE = {"reduction": "exchange"}


def model(policy: MixedPrecisionPolicy) -> nn.Module:
    return sharded_llama(TinyLlamaConfig(blocks=1), mp_policy=policy)


def train(policy: MixedPrecisionPolicy, options: dict[str, Any]) -> tuple[list[str], int, list[Plan]]:
    plans: list[Plan] = []

    def noted(*args: Any, **named: Any) -> Plan:
        plans.append(make_plan(*args, **named))
        return plans[-1]

    make_plan, compilation.make_plan = compilation.make_plan, noted
    try:
        wrong, nonzero = compare(partial(model, policy), Recipe(), partial(backends.overlap_eager, options=options))
    finally:
        compilation.make_plan = make_plan
    return wrong, nonzero, plans


RUNS = {
    "copies, bf16 reduced in fp32": partial(train, BF16, COPY),
    "copies of parameters, all bf16": partial(train, ALL_BF16, COPY | {"reduction": "ring"}),
    "copies, one launch a parameter": partial(train, BF16, COPY | {"coalesce": "off"}),
    "ring, one launch a parameter": partial(train, BF16, {"transport": "nccl", "reduction": "ring", "coalesce": "off"}),
    "exchange": partial(train, BF16, EXCHANGE | {"transport": "nccl"}),
    "by itself": partial(train, BF16, {}),
}
TARGETS = {
    "copies, bf16 reduced in fp32": {"gather_start", "exchange_start"},
    "copies of parameters, all bf16": {"gather_start", "reduce_scatter_tensor"},
    "copies, one launch a parameter": {"gather_start", "exchange_start"},
    "ring, one launch a parameter": {"all_gather_into_tensor", "reduce_scatter_tensor"},
    "exchange": {"all_gather_into_tensor", "exchange_start"},
    "by itself": {"all_gather_into_tensor", "exchange_start", "reduce_scatter_tensor"},
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return run_cases(RUNS, ranks=2)


@pytest.mark.parametrize("run", RUNS)
def test_the_numbers_are_those_of_eager_fsdp2(run: str, outcomes: dict[str, Outcome]) -> None:
    for rank, (wrong, nonzero_gradients, _) in enumerate(outcomes[run].values()):
        assert wrong == [], f"rank {rank}"
        assert nonzero_gradients > 0


@pytest.mark.parametrize("run", RUNS)
def test_the_carrier_is_the_one_that_was_asked_for(run: str, outcomes: dict[str, Outcome]) -> None:
    for _, _, plans in outcomes[run].values():
        launches = [op for plan in plans for op in plan.program.launches]
        assert {op.target.split(".")[1] for op in launches} == TARGETS[run]
        for op in launches:
            assert op.collective is not None
            assert op.collective.by_copy == (op.target.startswith("overlap_pass") and run.startswith("copies"))


def test_both_ranks_launch_in_the_same_order(outcomes: dict[str, Outcome]) -> None:
    for outcome in outcomes.values():
        first, second = ([plan.skeleton for plan in plans] for _, _, plans in outcome.values())
        assert first == second


def test_gradients_that_a_matmul_writes_travel_at_half_the_size(outcomes: dict[str, Outcome]) -> None:
    def reduced_bytes(run: str) -> dict[str, int]:
        _, _, plans = outcomes[run].values()[0]
        return {
            op.collective.parameter or "": op.collective.payload_bytes
            for plan in plans
            for op in plan.program.launches
            if op.collective is not None and op.collective.kind == "reduce_scatter"
        }

    ring, exchange = reduced_bytes("ring, one launch a parameter"), reduced_bytes("copies, one launch a parameter")
    assert ring.keys() == exchange.keys()
    for parameter, sent_bytes in ring.items():
        by_matmul = not any(word in parameter for word in ("norm", "embedding", "bias"))
        assert exchange[parameter] == (sent_bytes // 2 if by_matmul else sent_bytes), parameter


@pytest.mark.parametrize("case", ["copies, one launch a parameter", "exchange"])
def test_what_is_summed_is_held_from_its_sum_on_and_is_no_larger_than_the_gradient(
    outcomes: dict[str, Outcome], case: str
) -> None:
    """So a sum that has to be made early holds no more than the plan, which counts the gradient until then."""
    _, _, plans = outcomes[case].values()[0]
    sums = [(plan.program, op) for plan in plans for op in plan.program.ops if op.launch is not None and op.kernel]
    assert sums
    for program, op in sums:
        (storage,) = op.storages
        assert program.storages[storage].owner == op.name
        assert op.written_bytes <= op.read_bytes
