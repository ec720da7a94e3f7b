"""Which collective an event is, and how much it carries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["collective_kind", "payload_bytes"]

# In this order: "all_reduce" holds "reduce", and a broadcast may be spelt by NCCL as part of a longer name.
_KINDS = (
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("crossdevicereduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send_recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("reduce", "reduce"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
)

_ITEM_BYTES = {
    "bool": 1, "byte": 1, "char": 1,
    "bfloat16": 2, "half": 2, "short": 2,
    "float": 4, "int": 4,
    "double": 8, "long": 8, "complexfloat": 8,
}  # fmt: skip


def collective_kind(args: Mapping[str, Any], op: str, kernel: str) -> str | None:
    """``"all_gather"``, ``"reduce_scatter"``, …, from the first of these that says: arguments, CPU op, kernel's name.

    ``None`` where none does: grouped kernels of NCCL and RCCL are called ``Generic``.
    """
    for text in (str(args.get("Collective name", "")), op, kernel):
        letters = re.sub(r"[^a-z]", "", text.lower())
        for spelling, kind in _KINDS:
            if spelling in letters:
                return kind
    return None


def payload_bytes(args: Mapping[str, Any]) -> int | None:
    """Size of the full tensor: the larger of what goes in and what comes out; ``None`` where the event does not say."""
    elements = [args.get("In msg nelems"), args.get("Out msg nelems")]
    counts = [count for count in elements if isinstance(count, int)]
    dtype = str(args.get("dtype", "")).lower()
    item_bytes = 1 if dtype.startswith("float8") else _ITEM_BYTES.get(dtype)
    return max(counts) * item_bytes if counts and item_bytes is not None else None
