"""Which events ran on the device, and whether each computes, communicates or copies.

An event is communication by the first rule that fires, and the rule is kept:

1. ``ARGUMENTS``: the event names its collective (torch 2.4 and later).
2. ``LAUNCH``: the innermost CPU op around its launch is a collective's. This finds copy-engine collectives too, which are
   plain memory copies on the device, and leaves the copies in and out of a collective alone: those are launched by an
   ``aten`` op.
3. ``NAME``: the kernel's name is one of NCCL, RCCL, MSCCL, NVSHMEM, symmetric memory or a custom all-reduce.
4. ``ANNOTATION``: it lies inside an ``nccl:`` range on its own stream.

Every other kernel is compute: a list of names for compute would miss half of the kernels of a real model.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlap_pass.timeline.intervals import Interval, union
from overlap_pass.timeline.spans import Span, SpanKind
from overlap_pass.traces.chrome import Event
from overlap_pass.traces.collectives import collective_kind, payload_bytes

__all__ = ["DeviceEvent", "Rule", "device_events"]

_KERNELS = frozenset({"kernel", "concurrent_kernel"})
_COPIES = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime", "runtime"})
_CPU_OPS = frozenset({"cpu_op", "operator", "user_annotation"})

# Older ROCm runs copies and fills as kernels.
_COPY_KERNEL = re.compile(r"__amd_rocclr_(copy|fill)buffer|memory_copy_", re.IGNORECASE)

_COLLECTIVE_OP = re.compile(r"record_param_comms$|c10d::|_c10d_functional::|symm_mem::|nccl:")
_COLLECTIVE_KERNEL = re.compile(
    r"""(?:^|::)(?:
        nccl\w*kernel | rccl | mscclkernel                              # NCCL, RCCL, MSCCL, symmetric ones included
      | multimem_(?:all_reduce|one_shot|all_gather|reduce_scatter)      # symmetric memory through NVSwitch
      | (?:one|two)_shot_all_reduce | cross_device_reduce               # peer-to-peer all-reduces
      | nvshmem | deep_ep::
    )""",
    re.IGNORECASE | re.VERBOSE,
)


class Rule(enum.StrEnum):
    """Why an event counts as communication; see the module's text."""

    ARGUMENTS = "arguments"
    LAUNCH = "launch"
    NAME = "name"
    ANNOTATION = "annotation"


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """One thing that ran on a device.

    Attributes:
        span: what and when, on the clock of the file.
        device: its number.
        rule: why it is communication, ``None`` where it is not.
        launch_ns: when the CPU began to launch it; ``None`` where the file does not hold the launch, which happens for
            work that was queued before the profiler started.
    """

    span: Span
    device: int
    rule: Rule | None
    launch_ns: int | None


@dataclass(frozen=True, slots=True)
class _Launch:
    start_ns: int
    op: str
    """The innermost CPU op around the call, ``""`` where there is none."""


def device_events(events: Sequence[Event]) -> tuple[DeviceEvent, ...]:
    """The events that ran on a device and took time, sorted by (start, lane, name)."""
    on_device = [e for e in events if (e.category in _KERNELS or e.category in _COPIES) and e.start_ns < e.end_ns]
    launches = _launches(events, {_correlation(event) for event in on_device} - {None})
    ranges = _collective_ranges(events)
    found = [_device_event(event, launches.get(_correlation(event)), ranges) for event in on_device]
    return tuple(sorted(found, key=lambda e: (e.span.start_ns, e.span.lane, e.span.name)))


def _device_event(
    event: Event, launch: _Launch | None, ranges: Mapping[tuple[int, str], Sequence[Interval]]
) -> DeviceEvent:
    device, lane = _device(event), _lane(event)
    op = launch.op if launch else ""
    rule = _rule(event, op, ranges.get((device, lane), ()))
    return DeviceEvent(
        span=Span(
            name=event.name,
            kind=SpanKind.COMMUNICATION if rule else _kind_without_rule(event),
            lane=lane,
            start_ns=event.start_ns,
            end_ns=event.end_ns,
            collective=collective_kind(event.args, op if rule is Rule.LAUNCH else "", event.name) if rule else None,
            payload_bytes=payload_bytes(event.args) if rule else None,
        ),
        device=device,
        rule=rule,
        launch_ns=launch.start_ns if launch else None,
    )


def _rule(event: Event, op: str, ranges: Sequence[Interval]) -> Rule | None:
    if "Collective name" in event.args:
        return Rule.ARGUMENTS
    if _COLLECTIVE_OP.match(op):
        return Rule.LAUNCH
    if event.category in _KERNELS and _COLLECTIVE_KERNEL.search(_function(event.name)):
        return Rule.NAME
    if _is_inside(event, ranges):
        return Rule.ANNOTATION
    return None


def _kind_without_rule(event: Event) -> SpanKind:
    if event.category in _COPIES or _COPY_KERNEL.match(event.name):
        return SpanKind.COPY
    return SpanKind.COMPUTE


def _function(name: str) -> str:
    """The qualified function of a C++ signature: without return type, template arguments and parameters.

    >>> _function("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)")
    'multimem_all_reduce_kernel'
    """
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare, maxsplit=1)[0]


def _is_inside(event: Event, ranges: Sequence[Interval]) -> bool:
    position = bisect_right(ranges, event.start_ns, key=lambda interval: interval[0]) - 1
    return position >= 0 and event.end_ns <= ranges[position][1]


def _collective_ranges(events: Iterable[Event]) -> dict[tuple[int, str], list[Interval]]:
    """(device, lane) → where an ``nccl:`` annotation of the device's timeline lies."""
    ranges: dict[tuple[int, str], list[Interval]] = defaultdict(list)
    for event in events:
        if event.category == "gpu_user_annotation" and event.name.startswith("nccl:"):
            ranges[_device(event), _lane(event)].append((event.start_ns, event.end_ns))
    return {place: union(intervals) for place, intervals in ranges.items()}


def _launches(events: Iterable[Event], wanted: set[int | None]) -> dict[int | None, _Launch]:
    """Correlation → the CPU call that launched it, for the correlations of device events.

    All kernels of a CUDA graph share the correlation of their one graph launch.
    """
    ops: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
    calls: dict[tuple[int | str, int | str], list[Event]] = defaultdict(list)
    for event in events:
        if event.category in _CPU_OPS:
            ops[event.pid, event.tid].append(event)
        elif event.category in _LAUNCHES and _correlation(event) in wanted:
            calls[event.pid, event.tid].append(event)
    return {
        _correlation(call): _Launch(call.start_ns, op)
        for thread, made in calls.items()
        for call, op in _innermost(ops[thread], made)
    }


def _innermost(ops: Iterable[Event], calls: Iterable[Event]) -> Iterable[tuple[Event, str]]:
    """Each call with the name of the innermost op of its thread that encloses it."""
    pending = sorted(ops, key=lambda op: (op.start_ns, -op.end_ns))
    open_ops: list[Event] = []
    opened = 0
    for call in sorted(calls, key=lambda call: call.start_ns):
        while opened < len(pending) and pending[opened].start_ns <= call.start_ns:
            open_ops.append(pending[opened])
            opened += 1
        while open_ops and open_ops[-1].end_ns <= call.start_ns:
            open_ops.pop()
        yield call, open_ops[-1].name if open_ops else ""


def _correlation(event: Event) -> int | None:
    correlation = event.args.get("correlation")
    # ROCm writes 0 where it has none.
    return correlation if isinstance(correlation, int) and correlation else None


def _device(event: Event) -> int:
    device = event.args.get("device", event.pid)
    return device if isinstance(device, int) else 0


def _lane(event: Event) -> str:
    stream = event.args.get("stream")
    if stream is None:
        stream = str(event.tid).removeprefix("stream ")
    return f"stream {stream}"
