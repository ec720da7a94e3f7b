"""Which collective an event is, how much it carries, what moves it, and what it is called on other ranks."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Match", "Transport", "collective_kind", "match_of", "payload_bytes", "transport_of"]

# In this order: "all_reduce" holds "reduce", and a broadcast may be spelt by NCCL as part of a longer name.
_KINDS = (
    ("gatherstart", "all_gather"),
    ("exchangestart", "reduce_scatter"),
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


class Transport(enum.StrEnum):
    """What moves the bytes of a collective."""

    RING = "ring kernel"
    TREE = "tree kernel"
    SWITCH = "switch kernel"
    """NVLink SHARP or CollNet: the switch reduces."""
    SYMMETRIC = "symmetric kernel"
    PEER = "send and receive kernel"
    COPY_ENGINE = "copy engine"
    KERNEL = "kernel"
    """A kernel whose name does not say."""


_TRANSPORTS = (
    (
        re.compile(r"ncclSymk?|multimem_|(?:one|two)_shot_|cross_device_reduce|nvshmem", re.IGNORECASE),
        Transport.SYMMETRIC,
    ),
    (re.compile(r"NVLS|CollNet", re.IGNORECASE), Transport.SWITCH),
    (re.compile(r"SendRecv", re.IGNORECASE), Transport.PEER),
    (re.compile(r"TREE", re.IGNORECASE), Transport.TREE),
    (re.compile(r"RING", re.IGNORECASE), Transport.RING),
)


def transport_of(copies: bool, kernel: str) -> Transport:
    """What moves a collective that runs as this kernel, or as a memory copy (``copies``)."""
    if copies:
        return Transport.COPY_ENGINE
    return next((transport for pattern, transport in _TRANSPORTS if pattern.search(kernel)), Transport.KERNEL)


@dataclass(frozen=True, slots=True)
class Match:
    """What the same collective has in common on all ranks.

    Attributes:
        group: name and ranks of the process group, ``""`` where not known.
        collective: ``"all_gather"``, …, ``""`` where not known.
        sequence: its id or number in the group, which newer versions of torch write; ``None`` where not known: then the order tells.
    """

    group: str
    collective: str
    sequence: int | None


def match_of(args: Mapping[str, Any], collective: str | None) -> Match:
    group = f"{args.get('Process Group Name', '')} {args.get('Process Group Ranks', '')}".strip()
    # "Comms Id" is made of group, number and direction, so it tells more than the number; −1 stands for none.
    numbers = (args.get(name) for name in ("Comms Id", "Seq"))
    sequence = next((number for number in numbers if isinstance(number, int) and number >= 0), None)
    return Match(group, collective or "", sequence)
