"""What is known about operators, held against what torch itself says of them."""

from __future__ import annotations

import pytest
import torch

from overlap_pass.graph.targets import KNOWN_NAMESPACES, collective_kind, draws_random, is_opaque, is_wait

aten = torch.ops.aten


def overloads(namespace: str) -> list[torch._ops.OpOverload]:
    names = {
        schema.name: None for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{namespace}::")
    }
    found = []
    for name in names:
        packet = getattr(getattr(torch.ops, namespace), name.partition("::")[2], None)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return found


SCRIPT_ONLY = {"manual_seed", "initial_seed", "seed", "_no_grad_normal_", "_no_grad_uniform_"}
"""Of TorchScript; no tracer writes them into a graph."""


def test_every_operator_that_takes_a_generator_is_known_to_draw() -> None:
    """So are its overloads without the argument, which draw from the global generator."""
    taking = [op for op in overloads("aten") if any("Generator" in str(a.type) for a in op._schema.arguments)]
    names = {op._schema.name.partition("::")[2] for op in taking} - SCRIPT_ONLY
    assert len(names) > 20
    drawing = [op for op in overloads("aten") if op._schema.name.partition("::")[2] in names]
    assert [str(op) for op in drawing if not draws_random(op)] == []


@pytest.mark.parametrize(
    "op",
    [
        aten.native_dropout.default,
        aten.rand_like.default,
        aten.randint.default,
        aten.bernoulli_.float,
        aten.normal_.default,
        aten._scaled_dot_product_flash_attention.default,
        torch.ops.higher_order.run_and_save_rng_state,
        torch.ops.higher_order.run_with_rng_state,
        torch._prims.rng_prims.graphsafe_run_with_rng_state,
    ],
    ids=str,
)
def test_operators_that_draw_keep_their_order(op: object) -> None:
    assert draws_random(op)


def test_philox_operators_of_any_namespace_are_held_in_their_order() -> None:
    """Either they draw, or nothing crosses them."""
    found = [op for op in overloads("rngprims") if "philox" in op._schema.name]
    assert all(draws_random(op) or is_opaque(op) for op in found)


def test_every_functional_collective_is_a_launch_or_a_wait() -> None:
    found = overloads("_c10d_functional")
    assert len(found) > 10
    assert [str(op) for op in found if is_wait(op) is (collective_kind(op) is not None)] == []


def test_operators_of_unknown_namespaces_are_opaque_until_they_are_named() -> None:
    others = [op for name in ("quantized", "mkldnn", "fbgemm", "_c10d_functional_autograd") for op in overloads(name)]
    assert others
    assert all(is_opaque(op) for op in others)
    assert not any(is_opaque(op, {op.namespace}) for op in others)
    assert not any(is_opaque(op) for name in KNOWN_NAMESPACES for op in overloads(name))
