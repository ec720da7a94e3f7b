"""The kernels around copy engines, in Triton's interpreter where Triton is installed; on a device ``tests/gpu`` runs them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

CHECK = """
import torch
from overlap_pass.transport.kernels import cast_to_both, sum_pieces

torch.manual_seed(0)
for count in (1, 5, 4096, 10001):
    source = torch.randn(count)
    staging, result = torch.zeros(count + 700, dtype=torch.bfloat16), torch.zeros(2 * count, dtype=torch.bfloat16)
    cast_to_both(source, (staging, 256), (result, count))
    assert staging[256 : 256 + count].equal(result[count:])
    # The interpreter truncates where a device rounds.
    assert torch.allclose(result[count:].float(), source, rtol=2**-7)
    assert not staging[:256].any() and not staging[256 + count :].any() and not result[:count].any()
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
