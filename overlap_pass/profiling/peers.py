"""Torch's own overlap passes over the graph that we capture, as systems to be compared with.

Both are private and in motion: what a torch version lacks or has changed is named when the model is compiled, and the
rest of a comparison goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from importlib import import_module
from itertools import groupby
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils import flop_counter

from overlap_pass.errors import EnvironmentRefused
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.fsdp.module import UNIT
from overlap_pass.graph.read import ANNOTATION
from overlap_pass.rewrite.partition import prepare_joint

__all__ = ["buckets", "torch_manual", "torch_overlap"]


def torch_overlap(model: nn.Module) -> nn.Module:
    """Inductor's automatic overlap scheduling with bucketing (``schedule_overlap_bucketing``), defaults otherwise."""
    _count_grouped_heads()
    prefix = "aten_distributed_optimizations"
    make_traceable(model).compile(
        options={
            f"{prefix}.enable_overlap_scheduling": True,
            f"{prefix}.collective_bucketing": True,
            "joint_custom_post_pass": prepare_joint,  # without it torch would save gathered parameters (ZeRO-2)
        },
        dynamic=False,
    )
    return model


def _count_grouped_heads() -> None:
    """Let torch count the operations of attention whose keys have fewer heads than its queries.

    torch 2.11 refuses to, and with it its overlap scheduling, which counts all operations.
    """
    one = (1, 1, 1, 1)
    for name, others in (("sdpa_flop_count", ()), ("sdpa_backward_flop_count", ((1, 2, 1, 1),))):
        count = getattr(flop_counter, name)
        try:
            count(*others, (1, 2, 1, 1), one, one)
        except AssertionError:
            setattr(flop_counter, name, _with_all_heads(count))


def _with_all_heads(count: Callable[..., int]) -> Callable[..., int]:
    """Count as if keys and values had been repeated for each head of the queries, as the kernels compute.

    Args:
        count: takes shapes of (batch, heads, length, width).
    """

    @wraps(count)
    def counted(*shapes: Sequence[int]) -> int:
        heads = max(shape[1] for shape in shapes)
        return count(*((batch, heads, *others) for batch, _, *others in shapes))

    return counted


def torch_manual(model: nn.Module) -> nn.Module:
    """Torch's manual bucketing (``manual_overlap_bucketing``): one bucket a unit, prefetched by one unit.

    Raises:
        EnvironmentRefused: this torch has no such pass.
    """
    name = "torch._inductor.fx_passes.overlap_manual_scheduling"
    try:
        manual_overlap_bucketing = import_module(name).manual_overlap_bucketing
    except (ImportError, AttributeError) as error:
        raise EnvironmentRefused(
            f"torch {torch.__version__} has no {name}.manual_overlap_bucketing: leave torch-manual out"
        ) from error
    plan = buckets(make_traceable(model))

    def bucket(graph: fx.Graph) -> None:
        if any(_stack(node) for node in graph.nodes):
            manual_overlap_bucketing(graph.owning_module, plan, insert_overlap_deps=True, module_stack_fn=_stack)

    model.compile(
        options={"joint_custom_post_pass": prepare_joint, "post_grad_custom_post_pass": bucket}, dynamic=False
    )
    return model


def buckets(model: nn.Module) -> list[list[str]]:
    """Qualified names of what is gathered together: each unit below the root, and what the root holds between them.

    For a decoder: the embedding, each block, the last norm with the head.
    """
    parts = list(_parts(model, ""))
    return [
        [name for name, _ in run] for _, run in groupby(parts, key=lambda part: part[0] if part[1] else "of the root")
    ]


def _parts(module: nn.Module, path: str) -> Iterator[tuple[str, bool]]:
    """Outermost units, and modules of the root that hold parameters, in order of registration; whether each is a unit."""
    if path and UNIT in module.__dict__:
        yield path, True
        return
    if path and module._parameters:
        yield path, False
    for name, child in module.named_children():
        yield from _parts(child, f"{path}.{name}" if path else name)


def _stack(node: fx.Node) -> list[tuple[str, type[Any]]]:
    """The module whose parameter a collective gathers or reduces, in the form that torch's pass takes."""
    note = (node.meta.get("custom") or {}).get(ANNOTATION)
    if note is None or node.op != "call_function" or "_c10d_functional" not in str(node.target):
        return []
    return [("", nn.Module), (note["parameter"].rpartition(".")[0], nn.Module)]
