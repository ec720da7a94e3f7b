"""The device: lanes that run what was issued to them, from one start or end to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from overlap_pass.cost.model import CostTable
from overlap_pass.simulate.queues import Item, Queues

__all__ = ["Device"]


@dataclass(slots=True)
class _Lane:
    """A communicator: its queue, how far it is, and its current slow-down."""

    items: list[Item]
    head: int = 0
    running: Item | None = None
    factor: float = 1.0
    freed_us: float = -math.inf
    by_copy: bool = False

    @property
    def next_gate(self) -> float:
        """How many compute entries must have finished for something to start here; never while something runs."""
        idle = self.running is None and self.head < len(self.items)
        return self.items[self.head].gate if idle else math.inf


class Device:
    """The lanes while they run; ``now`` goes from event to event."""

    def __init__(self, queues: Queues, costs: CostTable) -> None:
        self._compute = queues.compute
        self._lanes = [_Lane(items, by_copy=name in queues.copy_lanes) for name, items in queues.collectives.items()]
        self._between_kernels = costs.starts_between_kernels
        self._sharing = costs.contention.communication_beside_communication - 1.0
        self._finished = 0
        self._running: Item | None = None
        self._compute_factor = 1.0
        self._active: list[_Lane] = []
        self._blocked_since = math.inf
        self.now = 0.0
        self.compute_us = self.communication_us = self.exposed_us = 0.0

    def run(self) -> None:
        while True:
            wake_us = min(self._start_compute(), self._start_collectives())
            self._set_factors()
            self._run_on(min(wake_us, self._next_communication_end()))
            event_us = min(wake_us, self._next_end())
            if event_us == math.inf:
                return
            self._account(event_us - self.now)
            self.now = event_us
            self._finish()

    def _start_compute(self) -> float:
        """Start the next compute op, past waits that are over; returns when to look again if the CPU is late."""
        compute, now = self._compute, self.now
        while self._running is None and self._finished < len(compute):
            item = compute[self._finished]
            if item.issued_us > now:
                return item.issued_us
            if item.launch is None:
                item.start_us, item.end_us = now, now + item.length_us * self._compute_factor
                self._running = item
            elif item.launch.end_us <= now:
                item.launch.blocked_us += max(0.0, now - self._blocked_since)
                self._blocked_since = math.inf
                self._finished += 1
            else:
                self._blocked_since = min(self._blocked_since, now)
                break
        return math.inf

    def _start_collectives(self) -> float:
        """Start on each free communicator what may start; returns when to look again if the CPU is late."""
        wake_us = math.inf
        for lane in self._lanes:
            if lane.running is not None or lane.head == len(lane.items):
                continue
            item = lane.items[lane.head]
            if item.gate > self._finished:
                continue
            if item.issued_us > self.now:
                wake_us = min(wake_us, item.issued_us)
                continue
            item.ready_us = min(item.ready_us, self.now)
            if self._between_kernels and not lane.by_copy and self._crowded_out(item, lane):
                continue
            item.start_us, item.end_us = self.now, self.now + item.length_us * lane.factor
            lane.running = item
            self._active.append(lane)
        return wake_us

    def _crowded_out(self, item: Item, lane: _Lane) -> bool:
        """A compute op got the multiprocessors first.

        At the same instant the compute op wins if it was the end of compute that made the collective ready (that news
        takes longer across streams than within one), and loses if it was the end of another collective.
        """
        running = self._running
        if running is None or running.start_us > item.ready_us:
            return False
        return running.start_us < item.ready_us or lane.freed_us < item.ready_us

    def _set_factors(self) -> None:
        """Note who runs beside whom; an end that was foreseen moves when the factor of its lane changes."""
        running, now = self._running, self.now
        factor = 1.0
        for lane in self._active:
            item = lane.running
            if item is not None and item.contention.compute_beside_communication > factor:
                factor = item.contention.compute_beside_communication
        if running is not None and factor != self._compute_factor:
            running.end_us = now + (running.end_us - now) * (factor / self._compute_factor)
        self._compute_factor = factor
        for lane in self._active:
            item = lane.running
            if item is None:
                continue
            factor = 1.0 + self._beside(item) * self._sharing if self._sharing else 1.0
            if running is not None:
                factor *= item.contention.communication_beside_compute
            if factor != lane.factor:
                item.end_us = now + (item.end_us - now) * (factor / lane.factor)
                lane.factor = factor

    def _beside(self, item: Item) -> int:
        """How many other collectives use its wire now."""
        return sum(lane.running is not None and lane.running.wire == item.wire for lane in self._active) - 1

    def _run_on(self, until_us: float) -> None:
        """Compute that meets nothing new: one op after the other, before anything starts or ends on another lane."""
        item = self._running
        if item is None:
            return
        compute, factor, finished = self._compute, self._compute_factor, self._finished
        now_us = self.now
        last = min([len(compute), *(lane.next_gate for lane in self._lanes)]) - 1
        while finished < last and item.end_us < until_us:
            following = compute[finished + 1]
            if following.launch is not None or following.issued_us > item.end_us:
                break
            self.compute_us += item.end_us - now_us
            now_us = following.start_us = item.end_us
            following.end_us = now_us + following.length_us * factor
            item = following
            finished += 1
        if self._active:
            self.communication_us += now_us - self.now
        self._running, self._finished, self.now = item, finished, now_us

    def _next_end(self) -> float:
        end_us = self._next_communication_end()
        return end_us if self._running is None else min(end_us, self._running.end_us)

    def _next_communication_end(self) -> float:
        end_us = math.inf
        for lane in self._active:
            if lane.running is not None and lane.running.end_us < end_us:
                end_us = lane.running.end_us
        return end_us

    def _account(self, passed_us: float) -> None:
        if self._active:
            self.communication_us += passed_us
        if self._running is not None:
            self.compute_us += passed_us
        elif self._active:
            self.exposed_us += passed_us

    def _finish(self) -> None:
        if self._running is not None and self._running.end_us <= self.now:
            self._running = None
            self._finished += 1
        for lane in tuple(self._active):
            if lane.running is not None and lane.running.end_us <= self.now:
                lane.running = None
                lane.freed_us = self.now
                lane.head += 1
                self._active.remove(lane)
