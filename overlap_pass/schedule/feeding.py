"""Feeding the lanes: one pass over the compute order that decides when each collective is launched and waited for.

At every boundary between two compute ops, for every communicator that would run dry before the next boundary:

1. a gather that is due (launched a boundary later it would start behind its latest start) is launched;
2. else the oldest gradient that exists is reduced, if the lane is free again before the next gather is due;
3. else the next gather goes ahead of time, if the policy allows it and its memory fits the budget;
4. else the gradient goes all the same (the lane must not idle).

A collective is never launched while its lane is busy beyond the next boundary: launching later costs nothing and holds
less memory. The latest start of a gather is its first reader's start minus its duration (times a margin), minus what
the lane still has to gather before: earliest deadline first, backwards (Jackson, 1955: EDF is feasible if any order is).

The clock of this pass is an estimate (contention is averaged); ``simulate`` judges the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from overlap_pass.graph.program import Role
from overlap_pass.schedule.ground import Boundary, Ground
from overlap_pass.schedule.held import Held
from overlap_pass.schedule.placement import BEFORE, WAITS, Key, Move

__all__ = ["Policy", "feed"]


@dataclass(frozen=True, slots=True)
class Policy:
    """How eager the feeding is.

    Attributes:
        margin: a gather counts this many times its duration when its latest start is computed.
        ahead_us: how long before its latest start a gather may go when the lane would idle (``inf``: any time).
        slack: how early a lane is fed, in times of its mean collective: the clock of the pass is an estimate, and where it errs
            by microseconds the lane would idle until the next boundary.
    """

    margin: float = 1.25
    ahead_us: float = 0.0
    slack: float = 0.0


def feed(ground: Ground, policy: Policy, budget_bytes: int | None) -> dict[int, Key]:
    """Wishes (see ``placement.place``) for every launch and every gradient's wait.

    Args:
        budget_bytes: bound on the peak, ``None`` for none.
    """
    return _Feeder(ground, policy, budget_bytes).run()


@dataclass(slots=True)
class _Lane:
    """A communicator.

    Attributes:
        gathers: parameter gathers that are still to be launched, by deadline.
        gradients: reductions whose input exists and that are still to be launched, oldest first.
        queued: launched and not started.
        free_us: when what runs on it ends.
        head_us: the longest that a launch on it has to wait for what leads to it.
        slack_us: how early it is fed, see :class:`Policy`.
        most_ahead_us: both; nothing is fed any earlier.
    """

    gathers: deque[Move]
    gradients: deque[Move] = field(default_factory=deque)
    queued: deque[tuple[Move, float]] = field(default_factory=deque)
    free_us: float = 0.0
    head_us: float = 0.0
    slack_us: float = 0.0
    most_ahead_us: float = 0.0


class _Feeder:
    def __init__(self, ground: Ground, policy: Policy, budget_bytes: int | None) -> None:
        self.ground, self.policy, self.held = ground, policy, Held(ground, budget_bytes)
        self.between_kernels = ground.costs.starts_between_kernels
        self.slow_down = ground.costs.contention.compute_beside_communication
        self.traffic_us, self.heads_us = ground.traffic_us, ground.head_us
        self.lanes = {group: _Lane(deque(gathers)) for group, gathers in ground.gathers.items()}
        self.lane_of = {launch: self.lanes[group] for launch, group in ground.groups.items()}
        for launch, lane in self.lane_of.items():
            lane.head_us = max(lane.head_us, ground.head_us[launch])
        for group, lane in self.lanes.items():
            lane.slack_us = policy.slack * ground.mean_us[group]
            lane.most_ahead_us = lane.head_us + lane.slack_us
        self.latest_us: dict[int, float] = {}
        for gathers in ground.gathers.values():
            self._note_latest_starts(gathers)
        self.now_us = self.busy_until_us = 0.0
        self.ends_us: dict[int, float] = {}
        self.flying: deque[Move] = deque()  # gradients launched and not waited for
        self.wishes: dict[int, Key] = {}
        self.waited: set[int] = set()
        self.sequence = 0

    def _note_latest_starts(self, gathers: Sequence[Move]) -> None:
        free_us = inf
        for move in reversed(gathers):
            taken_us = self.ground.traffic_us[move.launch] * self.policy.margin
            free_us = min(free_us, self.ground.starts_us[move.deadline]) - taken_us
            self.latest_us[move.launch] = free_us

    # -- the pass

    def run(self) -> dict[int, Key]:
        for boundary in self.ground.boundaries:
            if boundary.quiet and self._nothing_to_do(boundary):
                self._run_compute(boundary)
                continue
            drain = boundary is self.ground.boundaries[-1]
            self.held.arrive(boundary)
            for move in boundary.released:
                self.lanes[move.group].gradients.append(move)
            for lane in self.lanes.values():
                if lane.queued and lane.free_us <= self.now_us:
                    self._start_queued(lane)
                if lane.queued or lane.gathers or lane.gradients:
                    self._feed_lane(lane, boundary, drain=drain)
            for launch in boundary.reads:
                self._block_until(launch)
            if self.flying or self.held.overdue:
                self._wait_for_gradients(boundary, drain=drain)
            self._run_anchor(boundary)
        return self.wishes

    def _nothing_to_do(self, boundary: Boundary) -> bool:
        """Whether a look at every lane would change nothing; most boundaries are like that."""
        now_us = self.now_us
        end_us = now_us + boundary.runs_us
        for lane in self.lanes.values():
            if lane.queued:
                if lane.free_us <= now_us:
                    return False
            elif (
                (lane.gathers or lane.gradients)
                and lane.free_us < end_us + lane.most_ahead_us
                and self._runs_dry(lane, now_us, end_us)
            ):
                if lane.gradients and self.held.reduction_fits(lane.gradients[0], boundary):
                    return False
                gather = lane.gathers[0] if lane.gathers else None
                if gather and self._wanted(gather, boundary, now_us, end_us) and self._fits(gather, boundary):
                    return False
        over = self.flying and self.ends_us.get(self.flying[0].launch, inf) <= now_us
        return not over and not self.held.too_much(boundary)

    def _wanted(self, gather: Move, boundary: Boundary, start_us: float, horizon_us: float) -> bool:
        """Whether a gather is due, or may go ahead of time."""
        # The nominal clock knows nothing of blocking: what is lost by now moves all later readers.
        latest_us = self.latest_us[gather.launch] + start_us - boundary.starts_us
        due = latest_us < horizon_us + boundary.following_us
        return due or latest_us - self.policy.ahead_us <= self.now_us

    # -- launching

    def _feed_lane(self, lane: _Lane, boundary: Boundary, *, drain: bool) -> None:
        while lane.gathers and lane.gathers[0].deadline <= boundary.position:
            self._launch(lane.gathers.popleft(), lane, boundary)
        if lane.queued:
            if not boundary.reads and not drain:
                return  # it has something to start at the next boundary
            # Compute will block on what it reads here, so nothing keeps that from starting.
            for launch in boundary.reads:
                if self.lane_of[launch] is lane:
                    self._start_up_to(lane, launch)
        if not (lane.gathers or lane.gradients):
            return
        start_us = self._anchor_start_us(boundary) if boundary.reads else self.now_us
        horizon_us = start_us + boundary.runs_us
        while drain or self._runs_dry(lane, start_us, horizon_us):
            move = self._choose(lane, boundary, start_us, horizon_us)
            if move is None:
                return
            self._launch(move, lane, boundary)

    def _runs_dry(self, lane: _Lane, start_us: float, horizon_us: float) -> bool:
        """Whether the lane would have nothing to start at the next boundary, or only once what leads to it has run there.

        Where compute blocks first, the first of the queue starts with the anchor, and only the others wait for the
        boundary.
        """
        free_us = lane.free_us
        if lane.queued:
            if len(lane.queued) > 1 or start_us <= self.now_us:
                return False
            free_us += self.traffic_us[lane.queued[0][0].launch]
        fed_us = horizon_us + lane.slack_us
        if free_us < fed_us or free_us >= fed_us + lane.head_us:
            return free_us < fed_us
        heads_us = self.heads_us
        gather_us = heads_us[lane.gathers[0].launch] if lane.gathers else 0.0
        gradient_us = heads_us[lane.gradients[0].launch] if lane.gradients else 0.0
        return free_us < fed_us + (gather_us if gather_us > gradient_us else gradient_us)

    def _anchor_start_us(self, boundary: Boundary) -> float:
        """When the anchor will start, after the gathers that it is the first to read."""
        start_us = self.now_us
        for launch in boundary.reads:
            end_us = self._foreseen_end_us(launch)
            start_us = end_us if end_us > start_us else start_us
        return start_us

    def _foreseen_end_us(self, launch: int) -> float:
        """When a launched collective will have ended if the compute lane blocks on it from now on."""
        if launch in self.ends_us:
            return self.ends_us[launch]
        lane = self.lane_of[launch]
        end_us = max(lane.free_us, self.now_us)
        for move, _ in lane.queued:
            end_us += self.traffic_us[move.launch]
            if move.launch == launch:
                return end_us
        return self.now_us

    def _choose(self, lane: _Lane, boundary: Boundary, start_us: float, horizon_us: float) -> Move | None:
        gather = lane.gathers[0] if lane.gathers else None
        gradient = lane.gradients[0] if lane.gradients else None
        if gradient is not None and not self.held.reduction_fits(gradient, boundary):
            gradient = None
        if gather is not None:
            fits = self._fits(gather, boundary)
            # The nominal clock knows nothing of blocking: what is lost by now moves all later readers.
            latest_us = self.latest_us[gather.launch] + start_us - boundary.starts_us
            if fits and latest_us < horizon_us + boundary.following_us:
                return lane.gathers.popleft()
            free_us = max(lane.free_us, horizon_us if self.between_kernels else self.now_us)
            traffic_us = 0.0 if gradient is None else self.traffic_us[gradient.launch]
            if gradient is not None and (not fits or free_us + traffic_us <= latest_us):
                return lane.gradients.popleft()
            if fits and latest_us - self.policy.ahead_us <= self.now_us:
                return lane.gathers.popleft()
        return lane.gradients.popleft() if gradient is not None else None

    def _fits(self, gather: Move, boundary: Boundary) -> bool:
        return boundary.position >= gather.release and self.held.gather_fits(gather, boundary.position)

    def _launch(self, move: Move, lane: _Lane, boundary: Boundary, *, rank: int = BEFORE) -> None:
        self.sequence += 1
        self.wishes[move.launch] = (boundary.position, rank, self.sequence)
        self.now_us += self.heads_us[move.launch]
        lane.queued.append((move, self.now_us))
        if not self.between_kernels:
            self._start_queued(lane, everything=True)
        self.held.launch(move, boundary.position)
        if move.role is not Role.PARAMETER:
            self.flying.append(move)

    # -- running

    def _start_queued(self, lane: _Lane, *, everything: bool = False) -> None:
        """At a boundary the next collective starts if the lane is idle; while compute is blocked, one after another."""
        while lane.queued and (everything or lane.free_us <= self.now_us):
            ready_us = lane.queued[0][1]
            self._start_next(lane, ready_us if everything else max(ready_us, self.now_us))

    def _start_up_to(self, lane: _Lane, launch: int) -> None:
        while launch not in self.ends_us and lane.queued:
            self._start_next(lane, lane.queued[0][1])

    def _start_next(self, lane: _Lane, not_before_us: float) -> None:
        move, _ = lane.queued.popleft()
        self._occupy(lane, move.launch, max(lane.free_us, not_before_us) + self.traffic_us[move.launch])

    def _occupy(self, lane: _Lane, launch: int, until_us: float) -> None:
        lane.free_us = self.ends_us[launch] = until_us
        if until_us > self.busy_until_us:
            self.busy_until_us = until_us

    def _block_until(self, launch: int) -> None:
        """The compute lane waits for a collective; what is queued behind that one starts before compute goes on."""
        lane = self.lane_of[launch]
        self._start_up_to(lane, launch)
        self.now_us = max(self.now_us, self.ends_us[launch])
        if lane.queued:
            self._start_queued(lane)

    def _wait_for_gradients(self, boundary: Boundary, *, drain: bool) -> None:
        """Wait for reductions that are over by now, and earlier where the budget needs their inputs back."""
        while self.flying or self.held.overdue:
            late = drain or self.held.too_much(boundary)
            if self.flying and (late or self.ends_us.get(self.flying[0].launch, inf) <= self.now_us):
                self._wait_for_gradient(self.flying.popleft(), boundary)
            elif late and self.held.overdue:
                move = next(iter(self.held.overdue.values()))
                lane = self.lanes[move.group]
                lane.gradients.remove(move)
                self._launch(move, lane, boundary, rank=WAITS)
            else:
                return

    def _wait_for_gradient(self, move: Move, boundary: Boundary) -> None:
        self._block_until(move.launch)
        self.held.wait(move)
        self.sequence += 1
        self.wishes.update(dict.fromkeys(move.waits, (boundary.position, WAITS, self.sequence)))
        self.waited.add(move.launch)
        for follower in self.ground.followers.get(move.launch, ()):
            if all(launch in self.waited for launch in follower.after):
                self._launch(follower, self.lanes[follower.group], boundary, rank=WAITS)

    def _run_anchor(self, boundary: Boundary) -> None:
        if not boundary.communicates:
            self._run_compute(boundary)
            return
        lane = self.lane_of[boundary.position]
        self._start_queued(lane, everything=True)
        starts_us = max(lane.free_us, self.now_us)
        self._occupy(lane, boundary.position, starts_us + self.ground.duration_us[boundary.position])

    def _run_compute(self, boundary: Boundary) -> None:
        busy = self.busy_until_us > self.now_us
        self.now_us += boundary.runs_us * (self.slow_down if busy else 1.0)
