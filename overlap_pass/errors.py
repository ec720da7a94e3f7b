"""Every error that overlap-pass raises on purpose.

One root, one class per situation. A message says what is wrong, where (module, op or option), with numbers and
units, and what to try next. The command line prints the message as one line and exits with 2.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ConversionError",
    "EnvironmentRefused",
    "GraphError",
    "HardwareError",
    "IllegalSchedule",
    "InfeasibleBudget",
    "OptionError",
    "OverlapPassError",
    "PlanError",
    "RanksDiffer",
    "TraceError",
    "TransportError",
    "UncapturedCollectives",
]


class OverlapPassError(Exception):
    """Root of all errors of this package."""


class OptionError(OverlapPassError, ValueError):
    """An option is unknown, misspelt or out of range; the message names the option and the accepted values."""


class HardwareError(OptionError):
    """A hardware name or file is unknown or incomplete; the message names the file and the missing key."""


class GraphError(OverlapPassError):
    """A graph cannot be read as a program (an unwaited value leaves it, an op has no metadata, …)."""


class PlanError(OverlapPassError):
    """A plan cannot be made, read or replayed (wrong graph, wrong version, damaged file)."""


class InfeasibleBudget(PlanError):
    """The memory budget is below what the graph needs in any order.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the smallest budget that fits.
    """

    def __init__(self, message: str, *, budget_bytes: int, smallest_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes


class IllegalSchedule(PlanError):
    """A schedule breaks a promise of the graph (data, mutation, random state, effects, groups, waits)."""


class RanksDiffer(PlanError):
    """Under ``OVERLAP_PASS_DEBUG=1``: ranks of one communicator are about to launch in different orders, or one is missing."""


class ConversionError(OverlapPassError):
    """A model cannot be made traceable; names the module and the reason. The model is left as it was."""


class UncapturedCollectives(OverlapPassError):
    """A compiled graph comes from a module whose FSDP2 hooks are live, so its collectives are not in the graph."""


class CaptureError(OverlapPassError):
    """A model could not be traced for planning."""


class TraceError(OverlapPassError):
    """A profiler trace cannot be read or holds no device events; names the file and, where known, the place."""


class TransportError(OverlapPassError):
    """Peers' memory cannot be reached, or a driver call on it failed; names the call and the way without."""


class EnvironmentRefused(OverlapPassError):
    """This machine or process lacks what the command needs (CUDA, a process group, a torch version)."""
