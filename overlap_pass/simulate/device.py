"""The device: lanes that run what was issued to them, from one start or end to the next."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass

from overlap_pass.cost.model import Contention, CostTable
from overlap_pass.simulate.queues import Item, Queues

__all__ = ["Device"]

_AT_ONCE = 64
"""Compute that is looked ahead at in one go, where nothing interferes."""

_ROUNDING = 1e-9


@dataclass(slots=True)
class _Lane:
    """A communicator: its queue, how far it is, its current slow-down, when what runs ends, and what has not started yet."""

    items: list[Item]
    by_copy: bool
    left_us: float
    head: int = 0
    running: Item | None = None
    end_us: float = math.inf
    factor: float = 1.0
    freed_us: float = -math.inf


class Device:
    """The lanes while they run; ``now`` goes from event to event.

    Args:
        stretch: every collective takes that many times its price.

    Attributes:
        starts_us, ends_us: of each entry of the compute queue that has run.
    """

    def __init__(self, queues: Queues, costs: CostTable, stretch: float = 1.0) -> None:
        queue = queues.compute
        for item in itertools.chain(*queues.collectives.values()):
            item.rewind(stretch)
        self._lengths_us, self._issued_us = queue.lengths_us, queue.issued_us
        self._count = len(self._lengths_us)
        self._stops, self._awaited, self._begun = [*queue.stops, self._count], queue.awaited, queue.begun
        self._holds = any(queue.begun)
        self._lanes = [
            _Lane(items, name in queues.copy_lanes, sum(item.length_us for item in items))
            for name, items in queues.collectives.items()
        ]
        self._between_kernels, self._recorded = costs.starts_between_kernels, costs.recorded
        self._sharing = costs.contention.communication_beside_communication - 1.0
        self._contended = costs.contention != Contention() or bool(costs.beside_compute)
        self._late = queues.cpu_us > 0.0
        self._finished = self._stop = 0  # of the compute queue, and how many of its stops
        self._runs = False  # whether its first unfinished entry does, until when, at which slow-down
        self._end_us = self._blocked_since = math.inf
        self._compute_factor = 1.0
        self._flying = 0  # collectives that run
        self.starts_us, self.ends_us = [math.inf] * self._count, [math.inf] * self._count
        self.now = 0.0
        self.compute_us = self.communication_us = self.exposed_us = 0.0

    def run(self, limit_us: float = math.inf) -> None:
        """Run everything; but where the step is sure to take longer than ``limit_us``, stop there, at an infinite time."""
        limit_us *= 1.0 + _ROUNDING
        left_us = [*itertools.accumulate(reversed(self._lengths_us), initial=0.0)] if limit_us < math.inf else []
        while True:
            wake_us = math.inf if self._runs else self._start_compute()
            late_us, gate = self._start_collectives()
            if self._holds and self._let_past():
                continue
            if self._contended:
                self._set_factors()
            wake_us = late_us if late_us < wake_us else wake_us
            for lane in self._lanes:
                if lane.end_us < wake_us:
                    wake_us = lane.end_us
            if self._end_us < wake_us:
                self._run_on(wake_us, gate)
                wake_us = min(wake_us, self._end_us)
            if wake_us == math.inf:
                return
            self._pass_time(wake_us)
            self._finish()
            if left_us and self._least_us(left_us) > limit_us:
                self.now = math.inf
                return

    def _least_us(self, left_us: list[float]) -> float:
        """No less than that, the step will take; of what runs now, nothing is counted."""
        waiting_us = left_us[self._count - self._finished - self._runs]
        for lane in self._lanes:
            waiting_us = lane.left_us if lane.left_us > waiting_us else waiting_us
        return self.now + waiting_us

    def _start_compute(self) -> float:
        """Start the next compute op, past waits that are over; returns when to look again if the CPU is late."""
        now = self.now
        while not self._runs and self._finished < self._count:
            at = self._finished
            if self._late and self._issued_us[at] > now:
                return self._issued_us[at]
            if at < self._stops[self._stop]:
                self.starts_us[at] = now
                self._end_us = now + self._lengths_us[at] * self._compute_factor
                self._runs = True
                break
            awaited = self._awaited[self._stop]
            begun = self._begun[self._stop]
            if (awaited.start_us if begun else awaited.end_us) > now:
                self._blocked_since = min(self._blocked_since, now)
                break
            if not begun:
                awaited.blocked_us += max(0.0, now - self._blocked_since)
            self._blocked_since = math.inf
            self._finished += 1
            self._stop += 1
        return math.inf

    def _let_past(self) -> bool:
        """Whether compute stands behind a collective that has begun meanwhile."""
        at = self._finished
        if self._runs or at == self._count or at < self._stops[self._stop] or not self._begun[self._stop]:
            return False
        return self._awaited[self._stop].start_us <= self.now and not (self._late and self._issued_us[at] > self.now)

    def _start_collectives(self) -> tuple[float, float]:
        """Start on each free communicator what may start.

        Returns: when to look again if the CPU is late, and how much compute must have finished for another to start.
        """
        wake_us = gate = math.inf
        for lane in self._lanes:
            if lane.running is not None or lane.head == len(lane.items):
                continue
            item = lane.items[lane.head]
            if item.gate > self._finished:
                gate = item.gate if item.gate < gate else gate
                continue
            if item.issued_us > self.now:
                wake_us, gate = min(wake_us, item.issued_us), 0
                continue
            item.ready_us = min(item.ready_us, self.now)
            if self._between_kernels and not lane.by_copy and self._crowded_out(item, lane):
                gate = 0
                continue
            item.start_us = self.now
            item.end_us = lane.end_us = self.now + item.length_us * lane.factor
            lane.running = item
            lane.left_us -= item.length_us
            self._flying += 1
        return wake_us, gate

    def _crowded_out(self, item: Item, lane: _Lane) -> bool:
        """A compute op got the multiprocessors first.

        At the same instant the compute op wins if it was the end of compute that made the collective ready (that news
        takes longer across streams than within one), and loses if it was the end of another collective; in a recorded
        graph it wins then, too.
        """
        if not self._runs:
            return False
        start_us = self.starts_us[self._finished]
        if start_us != item.ready_us:
            return start_us < item.ready_us
        return self._recorded or lane.freed_us < item.ready_us

    def _set_factors(self) -> None:
        """Note who runs beside whom; an end that was foreseen moves when the factor of its lane changes."""
        now, factor = self.now, 1.0
        for lane in self._lanes:
            item = lane.running
            if item is not None and item.contention.compute_beside_communication > factor:
                factor = item.contention.compute_beside_communication
        if factor != self._compute_factor:
            if self._runs:
                self._end_us = now + (self._end_us - now) * (factor / self._compute_factor)
            self._compute_factor = factor
        for lane in self._lanes:
            item = lane.running
            if item is None:
                continue
            factor = 1.0 + self._beside(item) * self._sharing if self._sharing else 1.0
            if self._runs:
                factor *= item.contention.communication_beside_compute
            if factor != lane.factor:
                item.end_us = lane.end_us = now + (item.end_us - now) * (factor / lane.factor)
                lane.factor = factor

    def _beside(self, item: Item) -> int:
        """How many other collectives use its wire now."""
        return sum(lane.running is not None and lane.running.wire == item.wire for lane in self._lanes) - 1

    def _run_on(self, until_us: float, gate: float) -> None:
        """Compute that meets nothing new: one op after the other, before anything starts or ends on another lane."""
        first, end_us = self._finished, self._end_us
        last = min(gate, self._stops[self._stop], first + _AT_ONCE) - 1
        if first >= last:
            return
        lengths_us, factor = self._lengths_us[first + 1 : int(last) + 1], self._compute_factor
        if factor != 1.0:
            lengths_us = [length_us * factor for length_us in lengths_us]
        ends_us = [*itertools.accumulate(lengths_us, initial=end_us)]
        ran = bisect_left(ends_us, until_us, 0, len(lengths_us))
        if self._late and self._issued_us[first + ran] > end_us:
            issued_us = self._issued_us[first + 1 : first + ran + 1]
            ran = next((n for n, us in enumerate(issued_us) if us > ends_us[n]), ran)
        if not ran:
            return
        now_us = ends_us[ran - 1]
        self.starts_us[first + 1 : first + ran + 1] = self.ends_us[first : first + ran] = ends_us[:ran]
        self.compute_us += now_us - self.now
        if self._flying:
            self.communication_us += now_us - self.now
        self._finished, self._end_us, self.now = first + ran, ends_us[ran], now_us

    def _pass_time(self, until_us: float) -> None:
        passed_us = until_us - self.now
        if self._flying:
            self.communication_us += passed_us
        if self._runs:
            self.compute_us += passed_us
        elif self._flying:
            self.exposed_us += passed_us
        self.now = until_us

    def _finish(self) -> None:
        """End what ends now."""
        now = self.now
        if self._end_us <= now:
            self.ends_us[self._finished] = self._end_us
            self._runs = False
            self._end_us = math.inf
            self._finished += 1
        for lane in self._lanes:
            if lane.end_us <= now:
                lane.running, lane.end_us, lane.freed_us = None, math.inf, now
                lane.head += 1
                self._flying -= 1
