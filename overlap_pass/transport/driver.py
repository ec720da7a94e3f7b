"""Three calls of the CUDA driver that torch has no name for: write a word, wait for a word, copy, all in stream order.

None of them needs a multiprocessor: the words are read and written by the front end of the device, the copy is done by a
copy engine. So they start while a GEMM holds every multiprocessor, where a kernel would have to wait until it drains.

Source: CUDA driver API, "Stream Memory Operations" and ``cuMemcpyDtoDAsync``.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from overlap_pass.errors import TransportError

__all__ = ["copy", "wait_word", "write_word"]

_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32)(word - value) >= 0, so counters may wrap
_WORD = 0xFFFFFFFF


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(
            f"transport='copy_engine' needs the CUDA driver, which cannot be loaded: {error}"
        ) from error
    word = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    library.cuStreamWriteValue32_v2.argtypes = word
    library.cuStreamWaitValue32_v2.argtypes = word
    library.cuMemcpyDtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return library


def write_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Write a 32-bit word, of this device or a peer's, once all earlier work of the stream is done and visible."""
    _check(_driver().cuStreamWriteValue32_v2(stream.cuda_stream, address, value & _WORD, 0), "cuStreamWriteValue32")


def wait_word(stream: torch.cuda.Stream, address: int, value: int) -> None:
    """Hold the stream until the 32-bit word at ``address`` has reached ``value`` (modulo 2**32)."""
    _check(
        _driver().cuStreamWaitValue32_v2(stream.cuda_stream, address, value & _WORD, _AT_LEAST), "cuStreamWaitValue32"
    )


def copy(stream: torch.cuda.Stream, destination: int, source: int, size_bytes: int) -> None:
    """Copy between two addresses, each of this device or a peer's."""
    _check(_driver().cuMemcpyDtoDAsync_v2(destination, source, size_bytes, stream.cuda_stream), "cuMemcpyDtoDAsync")


def _check(code: int, call: str) -> None:
    if code:
        raise TransportError(
            f"{call} failed with CUDA error {code}: run with transport='nccl' and report the driver's version"
        )
