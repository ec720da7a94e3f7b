"""The events of a trace file as JSON rows, one batch after the other, out of files that are not always JSON.

Kineto writes names as they are, so quotes, backslashes and control characters in them break the file, and a job that is
killed leaves half of one. What can be read is read: the text is cut between events, a batch is parsed at once, and
where that fails each event of the batch is tried on its own, mended, or counted as broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from overlap_pass.errors import TraceError
from overlap_pass.traces.source import Source

__all__ = ["Scanner"]

Row = dict[str, Any]

_START = re.compile(r'"traceEvents"\s*:\s*')
_BOUNDARY = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp)"\s*:)')
_NAME = re.compile(r'("name"\s*:\s*)"(.*?)"(?=\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id|s|bp)"\s*:|\s*\})', re.DOTALL)
_BAD_ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|(?=.)|$)', re.DOTALL)
_LONGEST_EVENT = 64 << 20
_LONGEST_FRAME = 64 << 20
_MOST_FRAGMENTS = 8

# Floats stay literals: a float of an epoch in microseconds is off by a quarter of a microsecond.
_DECODER = json.JSONDecoder(strict=False, parse_float=str)


class Scanner:
    """Reads one source.

    Attributes:
        document: what stands beside the events (``distributedInfo``, …); complete once :meth:`batches` has ended.
        broken: events that could not be read.
        mended: events that could be after their name was escaped.
        complete: the list of events was read to its end.
    """

    def __init__(self, source: Source, take: Callable[[list[str]], list[str]]) -> None:
        """``take`` is offered the texts of events, all but each one's last brace, and gives back those to be parsed."""
        self.document: Row = {}
        self.broken = 0
        self.mended = 0
        self.complete = False
        self._source = source
        self._take = take

    def batches(self) -> Iterator[Sequence[object]]:
        """The events that have to be parsed, in the file's order.

        Raises:
            TraceError: the file holds no list of events.
        """
        pieces = self._source.pieces()
        rest = self._find_events(pieces)
        for piece in pieces:
            block = rest + piece
            cut = _last_boundary(block, len(rest) - 256)
            if cut is None:
                rest = self._bounded(block)
                continue
            rest = block[cut[1] :]
            trailer: list[str] = []
            yield self._rows(block[: cut[0]], trailer)
            if self.complete:
                self._read_trailer("".join(trailer) + block[cut[0] :], pieces)
                return
        trailer = []
        yield self._rows(rest, trailer)
        if self.complete:
            self._read_trailer("".join(trailer), pieces)

    def _find_events(self, pieces: Iterator[str]) -> str:
        text = ""
        for piece in pieces:
            text += piece
            head = text.lstrip()
            if head.startswith("["):
                return head[1:]
            match = _START.search(text)
            if match and match.end() < len(text):
                if text[match.end()] != "[":
                    break
                self.document = _loose(text[: match.start()] + '"events":0}')
                return text[match.end() + 1 :]
            if len(text) > _LONGEST_FRAME:
                break
        reason = self._source.damage or ("it is empty" if not text.strip() else "")
        raise TraceError(
            f"{self._source.path}: no list 'traceEvents': this is no PyTorch profiler trace"
            + (f" ({reason})" if reason else "")
        )

    def _bounded(self, block: str) -> str:
        if len(block) <= _LONGEST_EVENT:
            return block
        self.broken += 1
        return ""

    def _rows(self, block: str, trailer: list[str]) -> Sequence[object]:
        """All events of a block that begins and ends with one; ``trailer`` takes what stands behind the list's end."""
        pieces = _BOUNDARY.split(block)
        last = pieces.pop()
        kept = self._take(pieces)
        closed = last[: last.rfind("}")] if last.rstrip().endswith("}") else last
        try:
            rows: list[object] = _DECODER.decode("[" + "},".join([*kept, closed]) + "}]")
            return rows
        except (json.JSONDecodeError, RecursionError):
            return list(self._one_by_one([*kept, last], trailer))

    def _one_by_one(self, pieces: list[str], trailer: list[str]) -> Iterator[object]:
        position = 0
        while position < len(pieces):
            row, used, behind = self._next(pieces, position)
            position += used
            if row is not None:
                yield row
            if behind.startswith(",") and behind[1:].strip():
                # Two events that no boundary parts: the second one begins with a key that Kineto does not begin with.
                position -= 1
                pieces[position] = behind[1:].removesuffix("}") if position + 1 < len(pieces) else behind[1:]
            if behind.startswith("]"):
                self.complete = True
                trailer.append(behind[1:])
                # Nothing but the document's other entries follows, so what was cut there is put together again.
                trailer.extend("}," + piece for piece in pieces[position:])
                return

    def _next(self, pieces: Sequence[str], position: int) -> tuple[object, int, str]:
        """(event or ``None``, pieces it took, what follows it) at ``position``."""
        text = ""
        for used in range(1, min(_MOST_FRAGMENTS, len(pieces) - position) + 1):
            piece = pieces[position + used - 1]
            closed = position + used < len(pieces)
            text += ("," if text else "") + piece + ("}" if closed else "")
            found = _decoded(text)
            if found is not None:
                return found[0], used, found[1]
        text = pieces[position] + ("}" if position + 1 < len(pieces) else "")
        if text.lstrip().startswith("]"):
            return None, 1, text.lstrip()
        found = _decoded(_mended(text))
        if found is not None:
            self.mended += 1
            return found[0], 1, found[1]
        if text.strip():
            self.broken += 1
        return None, 1, _end_of_list(text) if position + 1 == len(pieces) else ""

    def _read_trailer(self, text: str, pieces: Iterator[str]) -> None:
        for piece in pieces:
            if len(text) < _LONGEST_FRAME:
                text += piece
        body = text.strip().removeprefix(",")
        self.document = {**self.document, **(_loose("{" + body) if body and body != "}" else {})}


def _last_boundary(block: str, start: int) -> tuple[int, int] | None:
    """(end of the last complete event, start of the next one)."""
    position = len(block)
    while position > max(0, start):
        position = block.rfind("}", max(0, start), position)
        if position < 0:
            return None
        match = _BOUNDARY.match(block, position)
        if match:
            return position + 1, match.end()
    return None


def _decoded(text: str) -> tuple[object, str] | None:
    bare = text.lstrip()
    try:
        row, end = _DECODER.raw_decode(bare)
    except (json.JSONDecodeError, RecursionError):
        return None
    behind = bare[end:].lstrip()
    # Behind an event comes the next one or the list's end; anything else means that the event was cut in two.
    return (row, behind) if not behind or behind[0] in "]," else None


def _mended(text: str) -> str:
    """The event with quotes and backslashes of its name escaped, and a backslash elsewhere that escapes nothing."""
    return _NAME.sub(lambda match: match[1] + json.dumps(_unescaped(match[2])), _escaped(text), count=1)


def _escaped(text: str) -> str:
    return _BAD_ESCAPE.sub(lambda match: match[0] if match[1] else "\\\\", text)


def _unescaped(name: str) -> str:
    try:
        value: str = _DECODER.decode(f'"{name}"')
        return value
    except json.JSONDecodeError:
        return name.replace('\\"', '"').replace("\\\\", "\\")


def _end_of_list(text: str) -> str:
    """The list's end and what follows, where the last event is broken: ``]`` at the end or before an entry."""
    match = re.search(r'\}\s*(\]\s*(?:,\s*"|\}|$).*)', text, re.DOTALL)
    return match[1] if match else ""


def _loose(text: str) -> Row:
    """The entries beside the events; where they are no JSON, the few that matter."""
    try:
        document = _DECODER.decode(text)
        return document if isinstance(document, dict) else {}
    except (json.JSONDecodeError, RecursionError):
        found: Row = {}
        info = {
            key: int(match[1])
            for key in ("rank", "world_size")
            if (match := re.search(rf'"distributedInfo".{{0,400}}?"{key}"\s*:\s*(\d+)', text, re.DOTALL))
        }
        if info:
            found["distributedInfo"] = info
        if match := re.search(r'"baseTimeNanoseconds"\s*:\s*(\d+)', text):
            found["baseTimeNanoseconds"] = int(match[1])
        return found
