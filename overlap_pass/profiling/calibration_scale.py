"""How much a calibration measures: the same numbers on every rank, none of them from a clock."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Scale"]

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes and counts.

    Attributes:
        collective_bytes: full tensors of the collectives.
        gemms: (rows, inner, columns) of bf16 matrix products.
        attention: (heads, tokens, head width) of causal attention.
        streamed_bytes: what copies, casts and pointwise kernels read.
        gather_bytes, reduce_bytes: full tensors of the collectives that run beside GEMMs.
        busy_gemms: GEMMs in a loop that collectives run beside.
        warm_rounds: GEMMs, each with a pass through memory, that a device does before its rates are measured.
        launches: kernels and collectives whose launches are timed on the CPU.
        batches: a time is the median of so many loops.
    """

    collective_bytes: tuple[int, ...]
    gemms: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int]
    streamed_bytes: int
    gather_bytes: int
    reduce_bytes: int
    busy_gemms: int
    warm_rounds: int
    launches: int
    batches: int = 3

    @classmethod
    def full(cls) -> Scale:
        """For GPUs: well under a minute over NVLink, about one where collectives go through host memory."""
        return cls(
            collective_bytes=(
                64 * _KIB, 256 * _KIB, 1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB, 1 * _GIB,
            ),
            gemms=(
                (1024, 4096, 4096), (4096, 4096, 1024), (4096, 4096, 4096), (4096, 4096, 14336), (4096, 14336, 4096),
                (8192, 8192, 8192),
            ),
            attention=(32, 4096, 128),
            streamed_bytes=512 * _MIB,
            gather_bytes=436 * 10**6,
            reduce_bytes=872 * 10**6,
            busy_gemms=200,
            warm_rounds=80,
            launches=200,
        )  # fmt: skip

    @classmethod
    def rehearsal(cls) -> Scale:
        """For CPUs over gloo: everything is run, and nothing of it means much."""
        return cls(
            collective_bytes=(64 * _KIB, 256 * _KIB, 1 * _MIB, 4 * _MIB),
            gemms=((64, 64, 64), (128, 256, 256), (256, 256, 512)),
            attention=(2, 128, 32),
            streamed_bytes=4 * _MIB,
            gather_bytes=1 * _MIB,
            reduce_bytes=2 * _MIB,
            busy_gemms=3,
            warm_rounds=1,
            launches=10,
        )

    def repeats(self, payload_bytes: int) -> int:
        """How often a collective of this size is queued for one time."""
        return 30 if payload_bytes <= 4 * _MIB else 8 if payload_bytes <= 64 * _MIB else 3
