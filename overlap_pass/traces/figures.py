"""What an analysis says, in numbers: the records that reports are made of.

All times are integer nanoseconds. Of one step, ``compute + exposed + exposed copies + idle = step``; the causes of exposed
time add up to the exposed time, and those of idle time to the idle time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlap_pass.timeline.intervals import Interval
from overlap_pass.timeline.spans import SpanKind, Timeline
from overlap_pass.timeline.stats import CollectiveStats, OverlapStats
from overlap_pass.traces.causes import ExposedCause, IdleCause
from overlap_pass.traces.collectives import Transport
from overlap_pass.traces.kernels import Rule
from overlap_pass.traces.periods import StepSource
from overlap_pass.traces.repairs import Repairs
from overlap_pass.traces.slowdown import Slowdown

__all__ = ["Analysis", "CollectiveFigures", "Coverage", "DeviceFigures", "StepFigures", "SyncFigures"]


@dataclass(frozen=True, slots=True)
class CollectiveFigures:
    """One collective of a step.

    Attributes:
        stats: its overlap.
        rule: why it counts as communication.
        transport: what moved its bytes.
        group: name and ranks of its process group, ``""`` where not known.
        blocked_ns, late_ns: parts of its exposed time; see :class:`~overlap_pass.traces.causes.ExposedCause`.
        wait_ns: how long it waited for the last rank to start, ``None`` where no other rank's trace has it.
        shares_lane: it ran on the stream that computes, where nothing can hide it.
    """

    stats: CollectiveStats
    rule: Rule
    transport: Transport
    group: str
    blocked_ns: int
    late_ns: int
    wait_ns: int | None
    shares_lane: bool

    @property
    def transfer_ns(self) -> int | None:
        """What is left of its duration once the last rank has started."""
        return None if self.wait_ns is None else self.stats.duration_ns - self.wait_ns


@dataclass(frozen=True, slots=True)
class SyncFigures:
    """Idle time behind one kind of synchronising call: the same call, op and line of code."""

    call: str
    op: str
    code: str | None
    count: int
    idle_ns: int


@dataclass(frozen=True, slots=True)
class StepFigures:
    """One step of one device, or the whole trace where it has no steps.

    Attributes:
        number: the n of ``ProfilerStep#n``, else counted from 0; ``None`` for a whole trace.
        start_ns, end_ns: on the file's clock.
        partial, counts: see :class:`~overlap_pass.traces.steps.Step`.
        timeline: for drawing.
        stats: the figures.
        exposed, idle: by cause.
        exposed_wait_ns: exposed time in which a collective waited for another rank; ``None`` without other ranks.
        wait_ns: all such time, exposed or not.
        reorderable_ns: exposed time in which a kernel that was launched waited for a collective that moved bytes: what
            another order of collectives could save at the very most.
        helper_ns: compute that only copies into and out of the buffers of collectives.
        copies_hide_ns: exposed communication during which something was copied.
        exposed_parts, late_parts: the sets of times, from the step's start, for drawing.
        collectives: in the timeline's order.
        syncs: most idle time first.
        kernels_ns: name and grid of compute kernels → their time together: what two runs of the same work share.
        launches: launches of kernels by the CPU in its step; ``None`` for a whole trace.
        missing: those among them whose kernel is not in the file.
    """

    number: int | None
    start_ns: int
    end_ns: int
    partial: bool
    counts: bool
    timeline: Timeline
    stats: OverlapStats
    exposed: Mapping[ExposedCause, int]
    idle: Mapping[IdleCause, int]
    exposed_wait_ns: int | None
    wait_ns: int | None
    reorderable_ns: int
    helper_ns: int
    copies_hide_ns: int
    exposed_parts: tuple[Interval, ...]
    late_parts: tuple[Interval, ...]
    collectives: tuple[CollectiveFigures, ...]
    syncs: tuple[SyncFigures, ...]
    kernels_ns: Mapping[str, int]
    launches: int | None
    missing: int

    @property
    def name(self) -> str:
        return "whole trace" if self.number is None else f"step {self.number}"

    @property
    def exposed_transfer_ns(self) -> int | None:
        return None if self.exposed_wait_ns is None else self.stats.exposed_ns - self.exposed_wait_ns

    def kind_ns(self, collective: str) -> int:
        """Summed duration of the collectives of a kind."""
        return sum(row.stats.duration_ns for row in self.collectives if row.stats.collective == collective)


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the figures of a device rest on, and what they leave out.

    Attributes:
        events: device events that took time.
        unlinked: those whose launch the file does not hold.
        in_order: those whose launch was told by order, as it shares no number with them.
        steps_from: what said where steps begin, in the file.
        unreadable, mended: events of the file left out, or read after mending.
        undecodable: characters that were no UTF-8.
        damage: why the file ends early.
        repairs: times that were mended.
        repeated: correlations that stand for several launches.
        silent_steps: CPU steps without device events.
        graphs: device events that CUDA graphs launched.
        overlapping_steps: whether CPU marks of steps lie over each other.
        issues_collectives: whether the CPU issued collectives, whatever the device ran.
    """

    events: int
    unlinked: int
    in_order: int
    steps_from: StepSource
    unreadable: int
    mended: int
    undecodable: int
    damage: str
    repairs: Repairs
    repeated: int
    silent_steps: tuple[int, ...]
    graphs: int
    overlapping_steps: bool
    issues_collectives: bool


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """All about one device of one file.

    Attributes:
        label: ``"rank 3"``, else the file's name.
        path: the file.
        rank, world_size: ``None`` where not known.
        device: its number.
        steps: in order; one for the whole trace where there are none.
        typical: position of the step of (lower) median length among those that count.
        rules: how many collectives each rule found.
        transports: (collective, transport) → how many.
        slowdown: of compute beside collectives.
        coverage: what the figures rest on.
    """

    label: str
    path: str
    rank: int | None
    world_size: int | None
    device: int
    steps: tuple[StepFigures, ...]
    typical: int
    rules: Mapping[Rule, int]
    transports: Mapping[tuple[str, Transport], int]
    slowdown: Slowdown
    coverage: Coverage

    @property
    def step(self) -> StepFigures:
        """The typical step."""
        return self.steps[self.typical]

    @property
    def computes_on(self) -> frozenset[str]:
        """Lanes of the typical step on which something computes."""
        return frozenset(span.lane for span in self.step.timeline.spans if span.kind is SpanKind.COMPUTE)


@dataclass(frozen=True, slots=True)
class Analysis:
    """All devices of all files, and what comparing the ranks gave.

    Attributes:
        devices: by rank, then device.
        late_ns: for each device, how long the others waited for it in its typical step, summed over collectives and
            over those that waited; ``None`` where only one trace was read.
        matched, unmatched: collectives with and without a partner on another rank.
        offsets_ns: what was added to each file's clock to bring the ends of collectives together.
    """

    devices: tuple[DeviceFigures, ...]
    late_ns: tuple[int, ...] | None
    matched: int
    unmatched: int
    offsets_ns: tuple[int, ...]

    @property
    def slowest(self) -> DeviceFigures:
        """The device with the longest typical step."""
        return max(self.devices, key=lambda device: device.step.stats.step_ns)
