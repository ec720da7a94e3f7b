"""Three things that the CUDA driver does in stream order and torch has no name for: wait for words, write words, copy.

None of them needs a multiprocessor: the words are read and written by the front end of the device, the copy is done by a
copy engine. So they start while a GEMM holds every multiprocessor, where a kernel would have to wait until it drains. All of
them can be recorded in a CUDA graph.

Source: CUDA driver API, "Stream Memory Operations" (``cuStreamBatchMemOp``) and ``cuMemcpyDtoDAsync``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

import torch

from overlap_pass.errors import TransportError

__all__ = ["Words", "copy", "submit"]

_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_AT_ONCE = 256  # the most that one call takes


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, whose waits and writes have the same layout."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),  # a union with a 32-bit value
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    )


class Words:
    """Waits and writes of 32-bit words, of this device or a peer's, which a stream does one after the other.

    A wait holds the stream until the word has the value. A write is done once all earlier work of the stream is done and
    visible to whoever sees it.
    """

    def __init__(self, *, waits: Sequence[tuple[int, int]] = (), writes: Sequence[tuple[int, int]] = ()) -> None:
        """Pairs of an address and a value; the waits come first."""
        self.waits: Final = tuple(waits)
        self.writes: Final = tuple(writes)
        operations = [_Operation(_WAIT, address, value, _EQUAL) for address, value in waits]
        operations += [_Operation(_WRITE, address, value, 0) for address, value in writes]
        parts = [operations[start : start + _AT_ONCE] for start in range(0, len(operations), _AT_ONCE)]
        self.calls: Final = tuple((len(part), (_Operation * len(part))(*part)) for part in parts)


def submit(stream: torch.cuda.Stream, words: Words) -> None:
    """Append to a stream what ``words`` says."""
    for count, operations in words.calls:
        _check(_driver().cuStreamBatchMemOp_v2(stream.cuda_stream, count, operations, 0), "cuStreamBatchMemOp")


def copy(stream: torch.cuda.Stream, destination: int, source: int, size_bytes: int) -> None:
    """Copy between two addresses, each of this device or a peer's."""
    _check(_driver().cuMemcpyDtoDAsync_v2(destination, source, size_bytes, stream.cuda_stream), "cuMemcpyDtoDAsync")


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(
            f"transport='copy_engine' needs the CUDA driver, which cannot be loaded: {error}"
        ) from error
    library.cuStreamBatchMemOp_v2.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint]
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


def _check(code: int, call: str) -> None:
    if code:
        raise TransportError(
            f"{call} failed with CUDA error {code}: run with transport='nccl' and report the driver's version"
        )
