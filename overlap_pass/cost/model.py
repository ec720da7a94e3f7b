"""Prices for the ops of a program: the table that the simulator and the strategies read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from overlap_pass.cost.collectives import collective_us, link_of
from overlap_pass.cost.compute import clusters, is_unknown, kernel_us, member_us
from overlap_pass.cost.contention import Contention
from overlap_pass.cost.hardware import Hardware
from overlap_pass.errors import OptionError
from overlap_pass.graph.program import Collective, CollectiveKind, OpKind, OpNode, Program

__all__ = ["COPY_ENGINE", "Contention", "CostTable", "price"]


COPY_ENGINE = "copy engine"

_MOST_PENDING = 6
"""A process has 8 queues to the device (``CUDA_DEVICE_MAX_CONNECTIONS``), of which compute has one and the collective that runs
another. Seen on 2 × H200."""


@dataclass(frozen=True)
class CostTable:
    """Price of each op.

    Attributes:
        duration_us: op name → microseconds alone on its lane. Views, inputs, waits and outputs cost 0.0. A compute op
            without a known price is priced by its memory traffic and listed in ``unknown``.
        launch_us: op name → microseconds of the CPU to launch it (0.0 where it launches nothing).
        contention: slow-down between lanes, in general.
        unknown: names of ops that no formula covers.
        hardware: name of the hardware file used.
        wires: group → the wire its collectives use; only those on one wire share it. A group that is not listed
            uses the wire ``""``.
        lanes: launch → what runs it, such as a copy engine; a launch that is not listed runs on its communicator.
        kernel_us: launch or wait → microseconds of the kernel that it runs on the compute lane itself.
        beside_compute: launch → how that collective and compute slow each other down, where it is not as in general.
        starts_between_kernels: a collective on an idle communicator starts only when the running compute op has ended
            (seen on H200: the GEMMs are persistent kernels that hold every multiprocessor until they end).
        recorded: the graph is replayed, so compute that becomes ready together with a collective starts first.
        most_pending: compute is held up behind a launch until all but so many collectives of communicators before it have begun,
            as in a recorded graph; ``None`` for never.
        cpu_ahead_us: how long before the device the CPU begins: what it is ahead by from the graph before.
    """

    duration_us: Mapping[str, float]
    launch_us: Mapping[str, float]
    contention: Contention
    unknown: tuple[str, ...] = ()
    hardware: str = ""
    wires: Mapping[str, str] = field(default_factory=dict)
    lanes: Mapping[str, str] = field(default_factory=dict)
    kernel_us: Mapping[str, float] = field(default_factory=dict)
    beside_compute: Mapping[str, Contention] = field(default_factory=dict)
    starts_between_kernels: bool = False
    recorded: bool = False
    most_pending: int | None = None
    cpu_ahead_us: float = 0.0

    def lane_of(self, launch: str, collective: Collective) -> str:
        """What runs the collective, one after the other with all others on it."""
        return self.lanes.get(launch, collective.group)

    def contention_of(self, launch: str) -> Contention:
        """How the collective and compute slow each other down while both run."""
        return self.beside_compute.get(launch, self.contention)


def price(
    program: Program,
    hardware: Hardware,
    *,
    measured: Mapping[str, float] | None = None,
    ranks_per_node: Mapping[str, int] | None = None,
) -> CostTable:
    """Price every op of ``program`` on ``hardware``, in linear time.

    Args:
        program: the graph.
        hardware: the machine, see :func:`~overlap_pass.cost.hardware.load_hardware`.
        measured: op name → microseconds, which replace the formulas; names that the program lacks are not looked at,
            so that one table can serve forward and backward. All ranks must use the same table.
        ranks_per_node: group → its members on each node, for groups that are not packed.

    Raises:
        OptionError: a measured time is negative or no number.
    """
    placed = ranks_per_node or {}
    duration_us = dict.fromkeys(program.order, 0.0)
    launch_us = dict.fromkeys(program.order, 0.0)
    unknown: list[str] = []
    for op in program.ops:
        if op.kind is OpKind.LAUNCH and op.collective is not None:
            duration_us[op.name] = collective_us(op.collective, hardware, placed.get(op.collective.group))
            launch_us[op.name] = _launch_us(op, op.collective, hardware)
        elif op.kind is OpKind.COMPUTE:
            duration_us[op.name] = kernel_us(op, hardware)
            launch_us[op.name] = hardware.compute.kernel_launch_us
        if is_unknown(op) or (op.collective is not None and op.collective.kind is CollectiveKind.OTHER):
            unknown.append(op.name)
    for cluster in clusters(program):
        duration_us.update(zip(cluster.members, member_us(cluster, hardware), strict=True))
        launch_us.update(dict.fromkeys(cluster.members[1 if cluster.runs else 0 :], 0.0))
    known = _measurements(measured or {}, duration_us)
    return CostTable(
        duration_us={**duration_us, **known},
        launch_us=launch_us,
        contention=hardware.contention,
        unknown=tuple(name for name in unknown if name not in known),
        hardware=hardware.name,
        kernel_us={op.name: _own_kernel_us(op, program, hardware) for op in program.ops if op.kernel},
        beside_compute=_beside_compute(program, hardware),
        lanes=_lanes(program, hardware),
        wires={group: link_of(size, hardware, placed.get(group)) for group, size in program.groups.items()},
        starts_between_kernels=True,
        recorded=hardware.recorded,
        most_pending=_MOST_PENDING if hardware.recorded else None,
    )


def _own_kernel_us(op: OpNode, program: Program, hardware: Hardware) -> float:
    """A gather casts the shard to two places: into its result and for the peers, which are one where the result itself lies in
    shared memory. A finish reads all ranks' pieces."""
    written_bytes = float(op.written_bytes)
    if op.collective is not None:
        lease = program.leases.get(op.name)
        written_bytes = (2 * written_bytes - (lease.final_bytes if lease else 0)) / op.collective.group_size
    kernel_us = hardware.compute.kernel_us + hardware.traffic_us(op.read_bytes + written_bytes)
    return kernel_us + _handshake_us(op, program, hardware)


def _handshake_us(op: OpNode, program: Program, hardware: Hardware) -> float:
    """Waits before the cast of a launch by copy, or before the sums of one, which share them."""
    launch = op if op.launch is None else program.op(op.launch)
    if hardware.copy_engine is None or launch.collective is None or not launch.collective.by_copy:
        return 0.0
    kernels = 1 if launch is op else len(program.waits_of[launch.name])
    return hardware.copy_engine.handshake_us / kernels


def _launch_us(op: OpNode, collective: Collective, hardware: Hardware) -> float:
    """A communicator takes several tensors in one call; each tensor that is copied costs calls of its own."""
    if collective.by_copy and hardware.copy_engine is not None:
        return hardware.copy_engine.launch_us * max(1, len(op.inputs))
    return hardware.compute.collective_launch_us


def _lanes(program: Program, hardware: Hardware) -> dict[str, str]:
    """One copy runs at a time, whoever asked for it and whichever way it goes (seen on H200: no two ever overlap)."""
    if hardware.copy_engine is None:
        return {}
    return {op.name: COPY_ENGINE for op in program.launches if op.collective is not None and op.collective.by_copy}


def _beside_compute(program: Program, hardware: Hardware) -> dict[str, Contention]:
    found = {}
    for op in program.launches:
        if op.collective is None:
            continue
        if op.collective.by_copy and hardware.copy_engine is not None:
            found[op.name] = hardware.copy_engine.contention
            continue
        own = hardware.contention_of(op.collective.kind, direct=op.collective.direct)
        if own != hardware.contention:
            found[op.name] = own
    return found


def _measurements(measured: Mapping[str, float], ops: Mapping[str, float]) -> dict[str, float]:
    for name, time_us in measured.items():
        if not math.isfinite(time_us) or time_us < 0:
            raise OptionError(f"measured time of {name!r} is {time_us!r} µs: it must be a number of at least 0")
    return {name: float(time_us) for name, time_us in measured.items() if name in ops}
