"""What the user sees while a command works: a spinner on a terminal, plain lines anywhere else, always on stderr."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

__all__ = ["Progress"]


class Progress:
    """A context in which ``show("what is going on")`` may be called as often as news arrive.

    On a terminal the current line is replaced beneath a spinner; elsewhere each new text is a line of its own, so
    that a log file can be followed.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Say what is going on now; the same text twice is said once."""
        if text == self._last:
            return
        self._last = text
        if self._status is not None:
            self._status.update(escape(text))
        else:
            self._console.print(escape(text), soft_wrap=True)
