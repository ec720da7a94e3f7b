"""One timeline out of two that run one after the other, such as the forward and the backward of a step."""

from __future__ import annotations

from dataclasses import replace

from overlap_pass.timeline.spans import Timeline

__all__ = ["concatenate"]


def concatenate(first: Timeline, second: Timeline, label: str) -> Timeline:
    """``second`` begins where the window of ``first`` ends.

    The result is ``predicted`` if either part is. Span names are kept as they are, so an op of the forward and an op
    of the backward may have the same name.
    """
    shift = first.window_ns
    moved = tuple(replace(s, start_ns=s.start_ns + shift, end_ns=s.end_ns + shift) for s in second.spans)
    return Timeline(label, shift + second.window_ns, first.spans + moved, first.predicted or second.predicted)
