"""Sharding a plain module in FSDP2's words, for those who have no ``fully_shard`` model yet."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from overlap_pass.errors import ConversionError

__all__ = ["shard"]

_FULL_PRECISION = MixedPrecisionPolicy()


def shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy = _FULL_PRECISION,
    reshard_after_forward: bool = True,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module:
    """``fully_shard`` for a model that will be compiled with this package's backends, which convert it.

    One call on the whole model is enough: a compiled model gathers each parameter by itself, where and when the schedule
    wants it, so units do not bound what is gathered at once. Calls on inner modules first, each with its own policy, work
    as with ``fully_shard``. Without compilation the model is plain FSDP2, with the units that were asked for.

    Args:
        module: a plain module; may be on the meta device.
        mesh: one-dimensional (shards) or two-dimensional (replicas of shards); ``None`` for all ranks.
        mp_policy, shard_placement_fn, ignored_params: handed to ``fully_shard``.
        reshard_after_forward: gather again in backward (ZeRO-3); ``False`` keeps gathered parameters. The default differs
            from ``fully_shard``'s, by which the outermost module keeps its parameters: here that may be the whole model.

    Returns:
        The same object, under ``fully_shard``.

    Raises:
        ConversionError: ``reshard_after_forward`` is a number of ranks, which no graph can follow.
    """
    if not isinstance(reshard_after_forward, bool):
        raise ConversionError(
            f"shard() of {type(module).__name__}: reshard_after_forward={reshard_after_forward!r} is not supported: "
            "use True or False"
        )
    return fully_shard(
        module,
        mesh=mesh,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        ignored_params=ignored_params,
    )
