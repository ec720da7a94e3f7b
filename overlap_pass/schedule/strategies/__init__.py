"""The strategies that come with the package, one file each; others join by the ``overlap_pass.strategies`` entry point."""

from __future__ import annotations

from overlap_pass.schedule.strategies.as_written import AsWritten
from overlap_pass.schedule.strategies.backward_post import BackwardPost
from overlap_pass.schedule.strategies.backward_pre import BackwardPre
from overlap_pass.schedule.strategies.exact import Exact
from overlap_pass.schedule.strategies.fill_gaps import FillGaps
from overlap_pass.schedule.strategies.greedy import Greedy
from overlap_pass.schedule.strategies.latest_start import LatestStart
from overlap_pass.schedule.strategies.local_search import LocalSearch

__all__ = [
    "BUILTIN",
    "AsWritten",
    "BackwardPost",
    "BackwardPre",
    "Exact",
    "FillGaps",
    "Greedy",
    "LatestStart",
    "LocalSearch",
]

BUILTIN: tuple[type, ...] = (AsWritten, BackwardPost, BackwardPre, Greedy, LatestStart, FillGaps, LocalSearch, Exact)
