"""Lowering that runs the scheduled FX graph as it is: the reference for numbers, and the quick way on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch._dynamo.backends.common import aot_autograd
from torch.fx.graph import _BoxedCodeGen

from compile_backends.compilation import Compilation
from overlap_pass.rewrite.partition import partition

__all__ = ["lower"]


def lower(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compilation: Compilation,
) -> Callable[..., Any]:
    """Trace a Dynamo graph with AOTAutograd and run forward and backward as FX code in the planned order."""

    def compile_graph(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        compilation.prepare(graph_module.graph)
        # Boxed code frees each input after its last reader; plain arguments would hold them until the return.
        graph_module.graph.set_codegen(_BoxedCodeGen())
        graph_module.recompile()
        forward = graph_module.forward

        def run(arguments: list[Any]) -> Any:
            return forward(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return compilation.guarded(run)

    compiler = aot_autograd(
        fw_compiler=compile_graph, bw_compiler=compile_graph, partition_fn=compilation.by_budget or partition
    )
    return compiler(gm, example_inputs)  # type: ignore[no-any-return]
