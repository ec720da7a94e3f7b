"""The text of a trace file in pieces: plain or gzip, whatever bytes are in it, and no more in memory than one piece."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from overlap_pass.errors import TraceError

__all__ = ["Progress", "Source"]

Progress = Callable[[int, int], None]
"""Called now and then with bytes of the file read, and its size."""

_PIECE_BYTES = 1 << 20
_CRUMB_BYTES = 16
_GZIP_MAGIC = b"\x1f\x8b"


class Source:
    """A file that is read once, from its beginning.

    Attributes:
        damage: what is wrong with the file as such, ``""`` as long as nothing is; known once :meth:`pieces` has ended.
        undecodable: characters that were no UTF-8, likewise.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.damage = ""
        self.undecodable = 0
        self._progress = progress

    def pieces(self) -> Iterator[str]:
        """The text; ends early, with :attr:`damage` set, where the compressed data end or break.

        Raises:
            TraceError: the file cannot be opened or read.
        """
        decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        for content in self._contents():
            text = decoder.decode(content)
            self.undecodable += text.count("\ufffd")
            yield text
        yield decoder.decode(b"", final=True)

    def _contents(self) -> Iterator[bytes]:
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                yield from self._unpacked(file, size)
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    def _unpacked(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        compressed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        raw = self._raw(file, size, _PIECE_BYTES // 8 if compressed else _PIECE_BYTES)
        yield from self._inflated(raw) if compressed else raw

    def _raw(self, file: BinaryIO, size: int, piece_bytes: int) -> Iterator[bytes]:
        done = 0
        while content := file.read(piece_bytes):
            done += len(content)
            if self._progress is not None:
                self._progress(done, size)
            yield content

    def _inflated(self, raw: Iterator[bytes]) -> Iterator[bytes]:
        """``gzip`` raises at the end of a cut file and keeps what it had read of the last piece; this gives it."""
        inflater, under_way = zlib.decompressobj(wbits=31), False
        for content in raw:
            while content:
                before = inflater.copy()
                try:
                    yield inflater.decompress(content, _PIECE_BYTES)
                except zlib.error as error:
                    self.damage = f"the gzip data are damaged ({error})"
                    yield from _crumbs(before, content)
                    return
                under_way = not inflater.eof
                content = inflater.unconsumed_tail
                if inflater.eof:
                    # Another member may follow; what is no member is padding.
                    content = inflater.unused_data.lstrip(b"\0")
                    inflater = zlib.decompressobj(wbits=31)
        yield inflater.flush()
        if under_way:
            self.damage = "the gzip file was not written to its end"


def _crumbs(inflater: zlib._Decompress, content: bytes) -> Iterator[bytes]:
    """What comes before the break: a call that fails gives nothing, so the last stretch is unpacked in small ones."""
    for start in range(0, len(content), _CRUMB_BYTES):
        try:
            yield inflater.decompress(content[start : start + _CRUMB_BYTES])
        except zlib.error:
            return
