"""The process group that torchrun set a process up for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from overlap_pass.errors import EnvironmentRefused

__all__ = ["ranks"]


@contextlib.contextmanager
def ranks(command: str) -> Iterator[tuple[torch.device, bool]]:
    """Join the group (NCCL on GPUs, gloo on CPUs); yields this rank's device and whether it is rank 0.

    Raises:
        EnvironmentRefused: not under torchrun.
    """
    if "RANK" not in os.environ:
        raise EnvironmentRefused(
            f"{command} runs on every rank: start it with torchrun --nproc-per-node N -m overlap_pass {command} …"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", device_id=device if device.type == "cuda" else None
    )
    try:
        yield device, dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
