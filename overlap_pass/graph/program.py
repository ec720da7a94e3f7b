"""What one graph computes, without torch: operations, the memory they live in, and the collectives among them.

``Program`` is what every room after ``graph.read`` works on. It is frozen, holds no tensor and no torch object, and
prints the same on every rank: group names are replaced by their number in order of first appearance.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

__all__ = [
    "Category",
    "Collective",
    "CollectiveKind",
    "Lease",
    "OpKind",
    "OpNode",
    "Phase",
    "Program",
    "Role",
    "Storage",
]


class OpKind(enum.StrEnum):
    """What a node is to the scheduler."""

    INPUT = "input"
    """A placeholder or constant: exists before the first op, takes no time."""
    COMPUTE = "compute"
    """Runs on the compute lane (kernels, copies); may allocate."""
    VIEW = "view"
    """Another name for memory that exists already; takes no time on the device."""
    LAUNCH = "launch"
    """Starts a collective: returns at once, its result may only be read behind its wait."""
    WAIT = "wait"
    """Makes the compute lane wait for a launch; its result is the launch's memory."""
    OUTPUT = "output"
    """Returns values to the caller; always the last op."""


class Phase(enum.StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class Category(enum.StrEnum):
    """The roofline that prices a compute op, and whether Inductor fuses it with its neighbours."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    COPY = "copy"
    INDEX = "index"
    OTHER = "other"
    NONE = "none"
    """Views, inputs, launches, waits: no compute."""

    @property
    def fusible(self) -> bool:
        return self in (Category.POINTWISE, Category.REDUCTION, Category.COPY)

    @property
    def moves_data(self) -> bool:
        """Casts, pads, copies and what is no compute at all: the values stay what they were."""
        return self in (Category.NONE, Category.POINTWISE, Category.COPY)


class CollectiveKind(enum.StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    OTHER = "other"


class Role(enum.StrEnum):
    """Why a collective is there; decides whether it may change places with others."""

    PARAMETER = "parameter"
    """Gathers a parameter from its shards: depends on graph inputs only."""
    GRADIENT = "gradient"
    """Reduces a gradient that leaves the graph; nothing in the graph computes with it."""
    ACTIVATION = "activation"
    """Tensor-, expert- or context-parallel traffic on the critical path; keeps its place among its like."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective launch.

    Attributes:
        kind: which collective.
        group: the communicator, as ``"g0"``, ``"g1"``, … in order of first appearance.
        group_size: ranks in the group.
        payload_bytes: size of the full (unsharded) tensor: the output of an all-gather, the input of a
            reduce-scatter or all-reduce.
        dtype: what travels.
        role: see :class:`Role`.
        unit: qualified name of the FSDP module (the wrapped block) that it serves, ``None`` where not known.
        parameter: qualified name of the parameter, ``None`` where not known.
        by_copy: copy engines carry it: it needs no multiprocessor, and keeps staging memory for itself.
        direct: of a reduction: every rank sends to every other by itself, as in an all-to-all, and not around a ring.
    """

    kind: CollectiveKind
    group: str
    group_size: int
    payload_bytes: int
    dtype: str
    role: Role
    unit: str | None = None
    parameter: str | None = None
    by_copy: bool = False
    direct: bool = False


@dataclass(frozen=True, slots=True)
class OpNode:
    """One operation.

    Attributes:
        name: unique within the program; the FX node's name.
        target: the operator, such as ``aten.mm.default``.
        inputs: names of the ops whose results it reads, each once, in argument order.
        storages: ids of the storages its result lives in; a view shares them with its base, a wait with its launch.
        writes: ids of storages that it changes in place.
        flops: floating-point operations (a multiply-add counts 2); ``None`` where no formula is known.
        read_bytes, written_bytes: memory traffic if the op ran alone, unfused.
        launch: for a wait, the name of the launch it waits for.
        kernel: a launch or wait that also runs a kernel of its own on the compute lane (a cast into staging memory, the
            sum of what has arrived), of ``read_bytes`` and ``written_bytes``.
        random: consumes the random state.
        opaque: unknown effects: nothing that moves may cross it.
    """

    name: str
    kind: OpKind
    target: str
    inputs: tuple[str, ...] = ()
    storages: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    category: Category = Category.NONE
    dtype: str = ""
    flops: int | None = 0
    read_bytes: int = 0
    written_bytes: int = 0
    collective: Collective | None = None
    launch: str | None = None
    kernel: bool = False
    random: bool = False
    opaque: bool = False

    @property
    def moves_data(self) -> bool:
        """A view, or compute that only casts, pads or copies."""
        return self.kind is OpKind.VIEW or (self.kind is OpKind.COMPUTE and self.category.moves_data)


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory.

    Attributes:
        id: its index in ``Program.storages``.
        size_bytes: bytes allocated.
        owner: the op that allocates it (an ``INPUT`` for what the caller passes in).
        held: the caller keeps it alive for the whole run (parameters, static inputs): never freed in the graph.
    """

    id: int
    size_bytes: int
    owner: str
    held: bool = False


@dataclass(frozen=True, slots=True)
class Lease:
    """The place of a gather by copy in the memory that the ranks share, where some of its results lie themselves.

    Attributes:
        capacity_bytes: of that memory, the same for all of a communicator.
        offset_bytes, size_bytes: which bytes of it.
        final: for each of its results, whether it lies there; of the others only what the peers fetch from here does.
        final_bytes: size of those that do, together. Their storages have no bytes of their own.
        behind: ops that read what lay there before: only behind them may anything be put there.
    """

    capacity_bytes: int
    offset_bytes: int
    size_bytes: int
    final: tuple[bool, ...]
    final_bytes: int
    behind: tuple[str, ...] = ()

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.size_bytes

    def meets(self, other: Lease) -> bool:
        """Whether both places have bytes in common."""
        return self.offset_bytes < other.end_bytes and other.offset_bytes < self.end_bytes


@dataclass(frozen=True)
class Program:
    """A graph in its order as written: ``ops[0]`` runs first and ``ops[-1]`` is the output.

    Ops are topologically sorted.

    Attributes:
        groups: the communicators' labels ``"g0"``, … with their numbers of ranks.
        launches_fixed: the launches keep this order in every schedule (``schedule.agreement``).
        activations_free: launches of activation collectives may change places with each other where data allow.
        most_in_flight: so many communicators at most have launches that are not waited for yet; ``None`` for no limit.
        leases: launch → its place, of all launches of a communicator or of none; those keep their order.
        shared_bytes: memory that the ranks share for the gathers of the graph before, and go on sharing.
    """

    name: str
    phase: Phase
    ops: tuple[OpNode, ...]
    storages: tuple[Storage, ...]
    groups: Mapping[str, int] = field(default_factory=dict)
    launches_fixed: bool = False
    activations_free: bool = False
    most_in_flight: int | None = None
    leases: Mapping[str, Lease] = field(default_factory=dict)
    shared_bytes: int = 0

    @cached_property
    def index(self) -> dict[str, int]:
        """Op name → position in the order as written."""
        return {op.name: position for position, op in enumerate(self.ops)}

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each position, the positions of the ops that read its result, ascending."""
        found: list[list[int]] = [[] for _ in self.ops]
        for position, op in enumerate(self.ops):
            for name in op.inputs:
                found[self.index[name]].append(position)
        return tuple(tuple(positions) for positions in found)

    @cached_property
    def waits_of(self) -> dict[str, tuple[str, ...]]:
        """Launch name → names of its waits (a coalesced launch has several)."""
        found: dict[str, list[str]] = {op.name: [] for op in self.launches}
        for op in self.ops:
            if op.kind is OpKind.WAIT and op.launch is not None:
                found[op.launch].append(op.name)
        return {name: tuple(waits) for name, waits in found.items()}

    def results(self, launch: OpNode) -> tuple[int, ...]:
        """Storages of what is waited for of a launch, in the order of its inputs; not those that it needs to send."""
        waited = {storage for name in self.waits_of[launch.name] for storage in self.op(name).storages}
        return tuple(storage for storage in launch.storages if storage in waited)

    @cached_property
    def launches(self) -> tuple[OpNode, ...]:
        """The collective launches, in the order as written."""
        return tuple(op for op in self.ops if op.kind is OpKind.LAUNCH)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Op names in the order as written."""
        return tuple(op.name for op in self.ops)

    def op(self, name: str) -> OpNode:
        return self.ops[self.index[name]]

    def touched(self, op: OpNode) -> frozenset[int]:
        """Storages that an op names, reads or writes; a wait stands for the end of its collective's reads, too."""
        return self._touched[self.index[op.name]]

    @cached_property
    def _touched(self) -> tuple[frozenset[int], ...]:
        storages_of = {op.name: op.storages for op in self.ops}
        found = []
        for op in self.ops:
            touched = [*op.storages, *op.writes]
            for name in op.inputs:
                touched += storages_of[name]
            if op.kind is OpKind.WAIT and op.launch is not None:
                for name in self.op(op.launch).inputs:
                    touched += storages_of[name]
            found.append(frozenset(touched))
        return tuple(found)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the whole content: the same graph gives the same digest on every rank."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "phase": self.phase.value,
            "ops": [asdict(op) for op in self.ops],
            "storages": [asdict(storage) for storage in self.storages],
            "groups": dict(self.groups),
            "launches_fixed": self.launches_fixed,
            "activations_free": self.activations_free,
            "most_in_flight": self.most_in_flight,
            "leases": {name: asdict(lease) for name, lease in self.leases.items()},
            "shared_bytes": self.shared_bytes,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        return cls(
            name=data["name"],
            phase=Phase(data["phase"]),
            ops=tuple(_op_from_json(op) for op in data["ops"]),
            storages=tuple(Storage(**storage) for storage in data["storages"]),
            groups=dict(data["groups"]),
            launches_fixed=data.get("launches_fixed", False),
            activations_free=data.get("activations_free", False),
            most_in_flight=data.get("most_in_flight"),
            leases={name: _lease_from_json(lease) for name, lease in data.get("leases", {}).items()},
            shared_bytes=data.get("shared_bytes", 0),
        )


def _lease_from_json(data: Mapping[str, Any]) -> Lease:
    return Lease(**{**data, "final": tuple(data["final"]), "behind": tuple(data["behind"])})


def _op_from_json(data: Mapping[str, Any]) -> OpNode:
    fields = dict(data)
    collective = fields.pop("collective")
    if collective is not None:
        collective = Collective(
            **{**collective, "kind": CollectiveKind(collective["kind"]), "role": Role(collective["role"])}
        )
    for name in ("inputs", "storages", "writes"):
        fields[name] = tuple(fields[name])
    return OpNode(
        **{**fields, "kind": OpKind(fields["kind"]), "category": Category(fields["category"]), "collective": collective}
    )
