"""Runs several example scripts one after the other on the ranks of one torchrun, which imports torch once and not each time.

    torchrun … tests/cpu/examples_driver.py FOLDER '["plain.py", "--steps", "3"]' '["hsdp.py", "--replicas", "1"]'

Each script makes and destroys its own process group; ``FOLDER`` holds a new store for each, as a second group would read
what the first one left in torchrun's.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


def main() -> None:
    folder, *calls = sys.argv[1:]
    init = dist.init_process_group
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for number, call in enumerate(calls):
        name, *arguments = json.loads(call)
        store = dist.FileStore(f"{folder}/{number}", ranks)
        dist.init_process_group = functools.partial(init, store=store, rank=rank, world_size=ranks)
        torch.compiler.reset()
        sys.argv = [name, *arguments]
        if rank == 0:
            print(f"== {name}", flush=True)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


if __name__ == "__main__":
    main()
