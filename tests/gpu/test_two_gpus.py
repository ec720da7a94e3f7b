"""What only GPUs can show: NCCL, generated Triton code, and numbers through both lowerings on two devices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from overlap_pass.profiling import llama
from overlap_pass.profiling.numbers import Numbers, numbers, reproducible
from overlap_pass.profiling.variants import BASELINES, scheduled
from overlap_pass.profiling.workload import Workload
from tests.cpu.ranks import run_cases
from tests.gpu.small_llama import group_of, place_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()
SHAPE = llama.LlamaConfig(layers=3, dim=256, heads=4, kv_heads=2, ffn_dim=512, vocab_size=512, max_tokens=256)


def _workload(policy: MixedPrecisionPolicy, prepare: Callable[[nn.Module], Callable[..., Any]]) -> Workload:
    device = place_of("cuda")
    mesh = DeviceMesh.from_group(group_of("cuda"), "cuda")
    torch.manual_seed(0)
    with device:
        model = llama.shard(llama.Llama(SHAPE), mesh=mesh, mp_policy=policy)
        torch.manual_seed(1 + dist.get_rank())
        batch = torch.randint(SHAPE.vocab_size, (2, 256))
    return Workload(model, prepare(model), _step, (batch, batch))


def _step(model: Callable[..., torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach()


def _numbers(policy: MixedPrecisionPolicy, prepare: Callable[[nn.Module], Callable[..., Any]]) -> Numbers:
    with reproducible():
        return numbers(_workload(policy, prepare))


def _differing(expected: Numbers, found: Numbers) -> list[str]:
    losses = [f"loss {i}" for i, (a, b) in enumerate(zip(expected.losses, found.losses, strict=True)) if not a.equal(b)]
    return losses + [name for name, value in expected.gradients.items() if not value.equal(found.gradients[name])]


def _compiled(backend: str, model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True)


def eager_against_fsdp2(policy: MixedPrecisionPolicy) -> list[str]:
    return _differing(
        _numbers(policy, BASELINES["fsdp2"].prepare), _numbers(policy, partial(_compiled, "overlap_eager"))
    )


def inductor_against_as_written(policy: MixedPrecisionPolicy) -> list[str]:
    expected = _numbers(policy, BASELINES["as-written"].prepare)
    torch._dynamo.reset()
    return _differing(expected, _numbers(policy, scheduled({}).prepare))


RING = {"transport": "nccl", "reduction": "ring"}
COPIES = {"transport": "copy_engine"}
GRAPHS = {"mode": "reduce-overhead"}


def side_by_side(backend: str, steps: int, *both: dict[str, str]) -> list[str]:
    """Steps of two models with other options each, memory churned with NaN in between: what differs, with its step."""
    found: list[str] = []
    with reproducible():
        one, other = (_workload(BF16, partial(_compiled_with, backend, options)) for options in both)
        for step in range(steps):
            junk = [torch.full((2**size,), float("nan"), device=place_of("cuda")) for size in range(10, 22)]
            del junk
            differing = _differing(*(_after(workload) for workload in (one, other)))
            found += [f"step {step}: {name}" for name in differing]
    torch.compiler.reset()  # recorded graphs hold the communicator's kernels
    return found


def _after(workload: Workload) -> Numbers:
    loss = workload()
    gradients = {name: p.grad.to_local().clone() for name, p in workload.model.named_parameters()}
    with torch.no_grad():
        for parameter in workload.model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    return Numbers((loss,), gradients)


def _compiled_with(backend: str, options: dict[str, str], model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, options=options)


def orders_in_generated_code() -> list[tuple[str, str]]:
    """Planned and generated order of forward and backward, as strings of tokens."""
    from compile_backends import compilation

    planned: list[str] = []
    original = compilation.make_plan

    def note(*args: Any, **kwargs: Any) -> Any:
        plan = original(*args, **kwargs)
        planned.append("".join(_token(plan.program.op(name).target) for name in plan.schedule.order))
        return plan

    compilation.make_plan = note
    try:
        with torch._inductor.config.patch(fx_graph_cache=False):
            workload = _workload(BF16, scheduled({}).prepare)
            _, codes = torch._inductor.utils.run_and_get_code(workload)
    finally:
        compilation.make_plan = original
    return list(zip(planned, [_code_tokens(code) for code in codes], strict=True))


def _token(target: str) -> str:
    """One letter for what the order is about: launches, waits, matrix products."""
    for pattern, token in (
        (r"all_gather_into_tensor|gather_start", "A"),
        (r"reduce_scatter_tensor|exchange_start", "R"),
        (r"wait_tensor|exchange_finish", "w"),
        (r"aten\.(mm|addmm|bmm)\.", "C"),
    ):
        if re.search(pattern, target):
            return token
    return ""


def _code_tokens(code: str) -> str:
    tokens = []
    for line in code.splitlines():
        call = re.match(r"\s*(\w+ = )?torch\.ops\.(_c10d_functional|overlap_pass)\.\w+", line)
        if call:
            tokens.append(_token(call[0]))
        elif match := re.search(r"extern_kernels\.(mm|addmm|bmm)\(", line):
            tokens.append(_token(f"aten.{match[1]}."))
    return "".join(tokens)


CASES: dict[str, Callable[[], Any]] = {
    "eager fp32": partial(eager_against_fsdp2, FP32),
    "eager bf16": partial(eager_against_fsdp2, BF16),
    "inductor bf16": partial(inductor_against_as_written, BF16),
    "copies, eager": partial(side_by_side, "overlap_eager", 100, RING, COPIES),
    "copies, inductor": partial(side_by_side, "overlap", 50, RING, COPIES),
    "copies in CUDA graphs": partial(side_by_side, "overlap", 50, COPIES, COPIES | GRAPHS),
    "NCCL in CUDA graphs": partial(side_by_side, "overlap", 50, RING, RING | GRAPHS),
    "order": orders_in_generated_code,
}


@pytest.fixture(scope="module")
def outcomes():
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    return run_cases(CASES, ranks=2, limit_s=400)


@pytest.mark.parametrize("case", ["copies, eager", "copies, inductor"])
def test_copies_give_the_bits_of_nccl_in_every_step(outcomes, case) -> None:
    assert outcomes[case].values() == ([], [])


@pytest.mark.parametrize("case", ["copies in CUDA graphs", "NCCL in CUDA graphs"])
def test_recorded_graphs_give_the_bits_of_the_same_code_in_every_step(outcomes, case) -> None:
    assert outcomes[case].values() == ([], [])


@pytest.mark.parametrize("case", ["eager fp32", "eager bf16"])
def test_losses_and_gradients_are_those_of_eager_fsdp2_over_nccl(outcomes, case) -> None:
    assert outcomes[case].values() == ([], [])


def test_the_schedule_changes_no_bit_of_what_inductor_computes(outcomes) -> None:
    assert outcomes["inductor bf16"].values() == ([], [])


def test_the_planned_order_is_the_order_of_the_generated_code_on_both_ranks(outcomes) -> None:
    first, second = outcomes["order"].values()
    assert first == second
    assert len(first) == 2, "a forward and a backward"
    for planned, generated in first:
        assert planned == generated
        assert "A" in planned
