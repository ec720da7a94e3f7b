"""What the terminal's renderers print through: text of one width, in which no name is anything but text."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment

__all__ = ["printed"]

_CONTROL = {code: "�" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printed(parts: Iterable[RenderableType], *, width: int, colour: bool = False) -> str:
    """The parts below each other, ending in a newline.

    Names come from traces and models of anybody's. Pass them as ``rich.text.Text``, so that brackets are no markup; control
    characters, which could move the cursor or retitle the window, are shown as a question mark.

    Args:
        width: columns.
        colour: with ANSI colours and bold print.
    """
    output = io.StringIO()
    console = Console(
        file=output, width=width, force_terminal=colour, color_system="standard" if colour else None, highlight=False
    )
    console.print(_Harmless(Group(*parts)))
    return "\n".join(line.rstrip() for line in output.getvalue().split("\n")).rstrip() + "\n"


class _Harmless:
    def __init__(self, inside: RenderableType) -> None:
        self._inside = inside

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._inside, options):
            yield Segment(segment.text.translate(_CONTROL), segment.style)
