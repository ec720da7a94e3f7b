"""What to do about a step, ranked by what it could save, each with the figures it rests on.

A finding that could save less than 2 % of the step is not worth a line. Orders and prefetch depths are advised only where the
device had a kernel in its queue that waited for a collective: a step that waits for its CPU is told so, and not to prefetch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overlap_pass.traces.causes import ExposedCause, IdleCause
from overlap_pass.traces.collectives import Transport
from overlap_pass.traces.figures import Analysis, DeviceFigures, StepFigures
from overlap_pass.traces.names import function_of
from overlap_pass.units import format_us

__all__ = ["LEAST_SHARE", "MOST_FINDINGS", "Finding", "advise", "is_cpu_bound", "reorder_bound_ns"]

MOST_FINDINGS = 5
LEAST_SHARE = 0.02
CPU_BOUND_SHARE = 0.1
SLOW_FACTOR = 1.15


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change.

    Attributes:
        kind: a short stable name: ``"dataloader"``.
        title: what is wrong, in one sentence.
        cost_ns: what it costs a step at most.
        share: that part of the step, from 0.0 to 1.0.
        evidence: the figures behind it, one sentence each.
        action: what to do next.
        device: label of the device it was seen on.
    """

    kind: str
    title: str
    cost_ns: int
    share: float
    evidence: tuple[str, ...]
    action: str
    device: str


def advise(analysis: Analysis) -> tuple[Finding, ...]:
    """The findings, the most expensive first: of each kind the device where it costs most."""
    worst: dict[str, Finding] = {}
    for device in analysis.devices:
        for rule in _RULES:
            for finding in rule(analysis, device):
                known = worst.get(finding.kind)
                if finding.share >= LEAST_SHARE and (known is None or finding.cost_ns > known.cost_ns):
                    worst[finding.kind] = finding
    ranked = sorted(worst.values(), key=lambda finding: (-finding.cost_ns, finding.kind))
    return tuple(ranked[:MOST_FINDINGS])


def is_cpu_bound(step: StepFigures) -> bool:
    """More than a tenth of the step goes to a CPU that launches too late, and more than to collectives that kernels wait
    for; or a tenth goes to exposed time before a launch, or to op dispatch, alone."""
    limit_ns = CPU_BOUND_SHARE * step.stats.step_ns
    largest_ns = max(step.exposed[ExposedCause.LATE], step.idle[IdleCause.DISPATCH])
    return largest_ns > limit_ns or _cpu_ns(step) > max(limit_ns, step.exposed[ExposedCause.BLOCKED])


def reorder_bound_ns(device: DeviceFigures) -> int:
    """No order of collectives can save more of the typical step: the exposed time in which a kernel that was launched
    waited for a collective that moved bytes, and no more than there is compute to hide it."""
    return min(device.step.reorderable_ns, device.step.stats.compute_ns)


def _cpu_ns(step: StepFigures) -> int:
    return step.exposed[ExposedCause.LATE] + step.idle[IdleCause.DISPATCH] + step.idle[IdleCause.UNTRACED]


def _time(time_ns: float) -> str:
    return format_us(time_ns / 1000)


def _percent(part_ns: float, whole_ns: float) -> str:
    return f"{100 * part_ns / whole_ns:.1f} %" if whole_ns else "0 %"


def _finding(
    device: DeviceFigures, kind: str, title: str, cost_ns: int, evidence: tuple[str, ...], action: str
) -> Finding:
    step_ns = device.step.stats.step_ns
    return Finding(kind, title, cost_ns, cost_ns / step_ns if step_ns else 0.0, evidence, action, device.label)


def _straggler(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    step = device.step
    wait_ns, transfer_ns = step.exposed_wait_ns, step.exposed_transfer_ns
    if analysis.late_ns is None or wait_ns is None or transfer_ns is None or wait_ns <= transfer_ns:
        return
    late = max(range(len(analysis.devices)), key=analysis.late_ns.__getitem__)
    straggler = analysis.devices[late]
    if straggler is device:
        return
    name, reason_ns = _largest_idle(straggler.step)
    evidence = (
        f"{_time(wait_ns)} of the {_time(step.stats.exposed_ns)} exposed communication is waiting for a rank that had not "
        f"started; {_time(transfer_ns)} is transfer",
        f"{straggler.label} started last in collectives that the others waited {_time(analysis.late_ns[late])} for",
        f"{straggler.label} itself is idle for {_time(straggler.step.stats.idle_ns)}, most of it "
        f"{name} ({_time(reason_ns)})",
    )
    action = f"look at {straggler.label}, not at the network: {_IDLE_ACTIONS[_largest_idle_cause(straggler.step)]}"
    yield _finding(device, "straggler", f"{device.label} waits for {straggler.label}", wait_ns, evidence, action)


def _sync(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    step = device.step
    cost_ns = step.idle[IdleCause.SYNC]
    if not step.syncs:
        return
    first = step.syncs[0]
    where = first.code or first.op or "no CPU op around it"
    evidence = tuple(
        f"{row.call} in {row.op or 'no CPU op'}{f', {row.code}' if row.code else ''}: {row.count} ×, idle {_time(row.idle_ns)}"
        for row in step.syncs[:3]
    )
    item = " (`.item()`, `float(tensor)`, `if tensor:`)" if first.op == "aten::_local_scalar_dense" else ""
    stacks = "" if first.code else "; profile once with with_stack=True to see the line"
    action = (
        f"take {first.call}{item} at {where} out of the step: keep the value on the device, read it every n-th step, or copy "
        f"with non_blocking=True from pinned memory{stacks}"
    )
    yield _finding(
        device,
        "sync",
        f"the CPU waits for the device in {first.call}, and the device then for the CPU",
        cost_ns,
        evidence,
        action,
    )


def _loader(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    cost_ns = device.step.idle[IdleCause.LOADER]
    evidence = (
        f"the device is idle for {_time(cost_ns)} of the step while the DataLoader's __next__ runs on the launching thread",
    )
    action = "raise DataLoader num_workers and prefetch_factor, set pin_memory=True, or move work out of __getitem__"
    yield _finding(device, "dataloader", "the step waits for data", cost_ns, evidence, action)


def _allocator(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    cost_ns = device.step.idle[IdleCause.ALLOCATOR]
    evidence = (f"the device is idle for {_time(cost_ns)} of the step while memory is allocated or freed",)
    action = (
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, leave the caching allocator more room (smaller batch or memory "
        "budget), and do not call torch.cuda.empty_cache() in the step"
    )
    yield _finding(device, "allocator", "the step waits for device memory", cost_ns, evidence, action)


def _cpu_bound(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    step = device.step
    late_ns = step.exposed[ExposedCause.LATE]
    dispatch_ns, untraced_ns = step.idle[IdleCause.DISPATCH], step.idle[IdleCause.UNTRACED]
    evidence = [
        f"queue empty: {_time(dispatch_ns)} in op dispatch, {_time(untraced_ns)} in Python or anything else that the trace does "
        "not show",
    ]
    if late_ns:
        evidence.append(
            f"of {_time(step.stats.exposed_ns)} exposed communication {_time(late_ns)} passed before the next compute kernel was launched"
        )
    hint = "; another order of collectives, or prefetching, does not help here" if is_cpu_bound(step) else ""
    graphs = "" if device.coverage.graphs else ", CUDA graphs (torch.compile mode='reduce-overhead')"
    action = (
        f"launch less: torch.compile{graphs}, a larger batch, fused optimizers; the profiler itself slows a CPU-bound step down, so "
        f"compare with unprofiled steps{hint}"
    )
    yield _finding(device, "cpu", "the CPU launches too late", _cpu_ns(step), tuple(evidence), action)


def _transfer(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    """Where bytes are what is waited for: no order hides more communication than there is compute."""
    step = device.step
    sharded_ns = sum(step.kind_ns(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    compute_ns = step.stats.compute_ns - step.helper_ns
    if is_cpu_bound(step) or sharded_ns - (step.wait_ns or 0) <= compute_ns or compute_ns <= 0:
        return
    sent_ns = sharded_ns - (step.wait_ns or 0)
    factor = math.ceil(10 * sent_ns / compute_ns) / 10
    evidence = (
        f"all-gathers, reduce-scatters and all-reduces take {_time(sharded_ns)}, compute {_time(compute_ns)}",
        f"they do not grow with the batch: from {factor:g} × the tokens per step on, compute could hide all of them",
    )
    action = (
        f"batch size × {factor:g}, {_accumulation(step, sent_ns / sharded_ns, compute_ns)}; else fewer bytes: bf16 "
        "parameters and gradients, HSDP (shard inside a node), reshard_after_forward=False where memory allows"
    )
    yield _finding(
        device,
        "transfer",
        "there is more to send than to compute",
        step.exposed[ExposedCause.BLOCKED],
        evidence,
        action,
    )


def _accumulation(step: StepFigures, sent: float, compute_ns: int) -> str:
    """What accumulating gradients without sync is good for: it sends reductions once, and gathers with each micro-batch.

    ``sent`` is the part of the communication that moves bytes. n micro-batches hide all of it from
    ``n · compute ≥ n · gathers + reductions`` on.
    """
    gathers_ns = sent * step.kind_ns("all_gather")
    reductions_ns = sent * (step.kind_ns("reduce_scatter") + step.kind_ns("all_reduce"))
    if gathers_ns >= compute_ns:
        return "for which gradient accumulation is no substitute, as each micro-batch gathers its parameters again"
    micro_batches = max(2, math.ceil(reductions_ns / (compute_ns - gathers_ns)))
    return f"or gradient accumulation over {micro_batches} micro-batches without sync"


def _blocked(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    step = device.step
    if is_cpu_bound(step):
        return
    for kind, (name, action) in _BLOCKED_ACTIONS.items():
        rows = [row for row in step.collectives if (row.stats.collective or "unknown") == kind and not row.shares_lane]
        blocked_ns = sum(max(0, row.blocked_ns - (row.wait_ns or 0)) for row in rows)
        cost_ns = min(blocked_ns, reorder_bound_ns(device))
        if not cost_ns:
            continue
        worst = max(rows, key=lambda row: row.blocked_ns)
        evidence = (
            f"kernels that were launched waited {_time(blocked_ns)} for {len(rows)} {name}{'s' * (len(rows) != 1)}",
            f"the worst: {worst.stats.unit or function_of(worst.stats.name)}, exposed {_time(worst.stats.exposed_ns)} of "
            f"{_time(worst.stats.duration_ns)}",
            f"another order could save {_time(reorder_bound_ns(device))} of the step at the very most",
        )
        yield _finding(device, f"blocked {name}", f"compute waits for {name}s", cost_ns, evidence, action)


def _same_stream(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    rows = [row for row in device.step.collectives if row.shares_lane]
    cost_ns = round(sum(row.stats.exposed_share_ns for row in rows))
    if not rows:
        return
    evidence = (
        f"{len(rows)} of {len(device.step.collectives)} collectives run on {rows[0].stats.lane}, where compute runs too",
    )
    action = "issue them with async_op=True or on a stream of their own; on one stream nothing can overlap"
    yield _finding(device, "same stream", "collectives run on the stream that computes", cost_ns, evidence, action)


def _slowdown(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    slow = device.slowdown
    if slow.factor is None or slow.factor < SLOW_FACTOR:
        return
    steps_ns = sum(step.stats.step_ns for step in device.steps)
    share = device.step.stats.step_ns / steps_ns if steps_ns else 0.0
    cost_ns = round((slow.overlapped_ns - slow.expected_ns) * share)
    evidence = (
        f"{slow.kernels} kernels with a collective beside them take {slow.factor:.2f} × as long as the same kernels without",
        f"{_time(device.step.stats.compute_ns)} compute a step would be about {_time(cost_ns)} less",
    )
    if all(transport is Transport.COPY_ENGINE for _, transport in device.transports):
        action = "copy engines take memory bandwidth alone: only fewer bytes help, as by more tokens a rank or by resharding less"
    else:
        action = (
            "leave compute more of the GPU: NCCL_MAX_CTAS or ncclConfig maxCTAs at a few, or copy-engine collectives (symmetric memory) "
            "where the hardware has them; judge by step time, not by the hidden share"
        )
    yield _finding(device, "slow compute", "compute slows down beside collectives", cost_ns, evidence, action)


def _queued(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    cost_ns = device.step.idle[IdleCause.QUEUED]
    evidence = (f"for {_time(cost_ns)} of the step work had been launched and nothing ran",)
    action = (
        "unset CUDA_DEVICE_MAX_CONNECTIONS if it is 1 (one queue holds streams up), look for cross-stream waits and for other "
        "processes on the GPU; the trace itself does not say which"
    )
    yield _finding(device, "queued", "launched work does not start", cost_ns, evidence, action)


def _latency(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    cost_ns = device.step.idle[IdleCause.LATENCY]
    kernels = len(device.step.timeline.spans)
    evidence = (
        f"{kernels} kernels and copies in the step; {_time(cost_ns)} passes between launches and starts of under 10 µs each",
    )
    graphs = "" if device.coverage.graphs else " or capture the step in CUDA graphs"
    action = f"fuse small kernels (torch.compile, foreach or fused optimizers){graphs}"
    yield _finding(device, "latency", "launch latency of many small kernels", cost_ns, evidence, action)


def _copies(analysis: Analysis, device: DeviceFigures) -> Iterator[Finding]:
    cost_ns = device.step.stats.exposed_copy_ns
    evidence = (f"copies and fills run alone for {_time(cost_ns)} of {_time(device.step.stats.copy_ns)}",)
    action = "copy inputs from pinned memory with non_blocking=True on a stream of their own, one step ahead"
    yield _finding(device, "copies", "nothing computes while memory is copied", cost_ns, evidence, action)


def _largest_idle_cause(step: StepFigures) -> IdleCause:
    return max(IdleCause, key=lambda cause: step.idle[cause])


def _largest_idle(step: StepFigures) -> tuple[str, int]:
    cause = _largest_idle_cause(step)
    return IDLE_NAMES[cause], step.idle[cause]


IDLE_NAMES = {
    IdleCause.SYNC: "a synchronising call",
    IdleCause.LOADER: "the DataLoader",
    IdleCause.ALLOCATOR: "the allocator",
    IdleCause.DISPATCH: "op dispatch",
    IdleCause.UNTRACED: "Python or anything else untraced",
    IdleCause.LATENCY: "launch latency",
    IdleCause.QUEUED: "launched work that had not started",
    IdleCause.UNKNOWN: "of unknown cause",
}

_IDLE_ACTIONS = {
    IdleCause.SYNC: "take the synchronising call out of its step",
    IdleCause.LOADER: "give its DataLoader more workers",
    IdleCause.ALLOCATOR: "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True there",
    IdleCause.DISPATCH: "its CPU launches too late (pin its threads, compare its host's load, torch.compile)",
    IdleCause.UNTRACED: "its CPU is busy outside of ops (pin its threads, garbage collection, logging, checkpoints)",
    IdleCause.LATENCY: "fuse its small kernels",
    IdleCause.QUEUED: "work waits in its queue (other processes on that GPU, cross-stream waits, CUDA_DEVICE_MAX_CONNECTIONS)",
    IdleCause.UNKNOWN: "profile it from its first step on",
}

_BLOCKED_ACTIONS = {
    "all_gather": (
        "all-gather",
        "prefetch one layer deeper (set_modules_to_forward_prefetch, or torch.compile(backend='overlap') with a larger "
        "memory_budget); reshard_after_forward=False saves the gathers of backward; all of these hold more parameters at a time",
    ),
    "reduce_scatter": (
        "reduce-scatter",
        "start them earlier: wrap smaller units so that the last ones of backward have compute left to hide behind, or let "
        "torch.compile(backend='overlap') order them; a fitting memory_budget lets gradients wait for a better place",
    ),
    "all_reduce": (
        "all-reduce",
        "DDP: a smaller bucket_cap_mb starts the first one earlier, gradient_as_bucket_view saves copies; tensor parallel: overlap it with "
        "the matmul (async tensor parallelism)",
    ),
    "all_to_all": (
        "all-to-all",
        "issue it before compute that does not need it (the next batch's embeddings, the shared experts) and wait for it late",
    ),
    "unknown": (
        "unnamed transfer",
        "launch them earlier, with more compute before what reads them; copies among GPUs that torch.compile(backend='overlap') planned: "
        "a larger memory_budget, or reshard='auto'",
    ),
}

_RULES: tuple[Callable[[Analysis, DeviceFigures], Iterator[Finding]], ...] = (
    _straggler,
    _sync,
    _loader,
    _allocator,
    _cpu_bound,
    _transfer,
    _blocked,
    _same_stream,
    _slowdown,
    _queued,
    _latency,
    _copies,
)
