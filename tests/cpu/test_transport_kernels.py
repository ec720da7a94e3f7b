"""The kernels around copy engines, in Triton's interpreter where Triton is installed; on a device ``tests/gpu`` runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from overlap_pass.memory.places import laid_out
from overlap_pass.transport.kernels import cast_to_both, sum_pieces

torch.manual_seed(0)
for sizes in ([1], [5], [10001], [4096, 7, 300], [3, 1, 4097, 2, 256, 128, 5, 640, 9, 70]):
    for rank in (0, 1):
        shards = [torch.randn(size) for size in sizes]
        results = [torch.zeros(2 * size, dtype=torch.bfloat16) for size in sizes]
        staging = torch.zeros(20000, dtype=torch.bfloat16)
        cast_to_both(shards, results, rank, (staging, 256))
        starts, size_bytes = laid_out(tuple(2 * size for size in sizes))
        for shard, result, start in zip(shards, results, starts):
            own, others = result.view(2, -1)[rank], result.view(2, -1)[1 - rank]
            # The interpreter truncates where a device rounds.
            assert torch.allclose(own.float(), shard, rtol=2**-7)
            assert not others.any()
            staged = staging[256 + start // 2 :][: len(shard)]
            assert staged.equal(own)
            staged.zero_()
        assert not staging.any()  # nothing beside them
        final = 0b0110110101  # those have one place, the others' lie close together
        again = [torch.zeros(2 * size, dtype=torch.bfloat16) for size in sizes]
        cast_to_both(shards, again, rank, (staging, 256), final)
        assert all(map(torch.equal, again, results))
        staged = [shard for number, shard in enumerate(shards) if not final >> number & 1]
        starts, size_bytes = laid_out(tuple(2 * len(shard) for shard in staged))
        for shard, start in zip(staged, starts):
            at = staging[256 + start // 2 :][: len(shard)]
            assert torch.allclose(at.float(), shard, rtol=2**-7)
            at.zero_()
        assert not staging.any()
for count in (1, 5, 4096, 10001):
    for ranks in (2, 3, 4):
        for rank in range(ranks):
            sent, landed = torch.randn(ranks * count).bfloat16(), torch.randn((ranks - 1) * count + 300).bfloat16()
            out = torch.zeros(count)
            sum_pieces(sent, (landed, 256), out, 1.0 / ranks, (rank, ranks))
            pieces = list(landed[256 : 256 + (ranks - 1) * count].view(ranks - 1, count))
            pieces.insert(rank, sent.view(ranks, count)[rank])
            total = pieces[0].float()
            for piece in pieces[1:]:
                total = total + piece.float()
            assert out.equal(total * torch.tensor(1.0 / ranks)), (count, rank, ranks)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_casts_and_sums_are_those_of_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "equal", found.stderr
