"""FX graph → ``Program``: the only door through which torch's graphs enter the planner.

Storage and alias sets come from the operators' schemas first (a returned alias shares its argument's storage, a wait
shares its launch's) and from the storages of ``meta["val"]`` second. Fake tensors alone are not enough: a wait's fake
result does not share its launch's storage, which would count every gathered parameter twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_iter

from overlap_pass.errors import GraphError
from overlap_pass.graph import targets
from overlap_pass.graph.program import (
    Category,
    Collective,
    CollectiveKind,
    OpKind,
    OpNode,
    Phase,
    Program,
    Role,
    Storage,
)
from overlap_pass.graph.roles import assign_roles
from overlap_pass.graph.shards import Extent, on_the_largest_rank

__all__ = ["ANNOTATION", "UNBACKED_SIZE", "phase_of", "read_program"]

ANNOTATION = "overlap_pass"
"""Key in ``node.meta["custom"]`` under which the capture notes unit and parameter of a collective."""

UNBACKED_SIZE = 1024
"""Stands in for a size that is known only at run time, so that plans stay equal on every rank."""


def read_program(graph: fx.Graph, phase: Phase, *, name: str = "graph", pure: Collection[str] = ()) -> Program:
    """Read an ATen graph with ``meta["val"]`` on its nodes.

    Sizes are those of the rank that holds the largest shards, so that every rank reads the same (``graph.shards``).

    Args:
        graph: functional or not, as AOTAutograd or Inductor's post-grad passes leave it.
        phase: decides which inputs the caller holds: all in forward, those named ``primals…`` in backward (the rest
            are saved activations and tangents, freed after their last reader).
        pure: namespaces of custom operators that do what their schema says and nothing else; all others are opaque.

    Raises:
        GraphError: an unwaited collective result leaves the graph or is read, or a value has no metadata.
    """
    reader = _Reader(phase, frozenset(pure))
    for node in graph.nodes:
        reader.read(node)
    ops, storages = on_the_largest_rank(assign_roles(reader.ops), reader.storages, reader.extents, reader.padded)
    return Program(name, phase, ops, storages, dict(reader.group_sizes.values()))


def phase_of(graph: fx.Graph) -> Phase:
    """AOTAutograd names the incoming gradients of a backward graph ``tangents…``; no other graph has such inputs."""
    inputs = graph.find_nodes(op="placeholder")
    return Phase.BACKWARD if any("tangents" in node.name for node in inputs) else Phase.FORWARD


class _Reader:
    """State of one pass over the nodes, in graph order."""

    def __init__(self, phase: Phase, pure: frozenset[str]) -> None:
        self.phase, self.pure = phase, pure
        self.ops: list[OpNode] = []
        self.storages: list[Storage] = []
        self.group_sizes: dict[str, tuple[str, int]] = {}
        self.extents: dict[str, Extent] = {}
        self.padded: set[str] = set()
        self._storages_of: dict[fx.Node, tuple[int, ...]] = {}
        self._storage_by_key: dict[int, int] = {}
        self._launch_of: dict[fx.Node, str] = {}

    def read(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            op = self._input(node)
        elif node.op == "output":
            op = self._output(node)
        elif targets.is_wait(node.target):
            op = self._wait(node)
        elif (kind := targets.collective_kind(node.target)) is not None:
            op = self._launch(node, kind)
        else:
            op = self._call(node)
        self._storages_of[node] = op.storages
        self.extents[node.name] = _extent(node)
        self.ops.append(op)

    # -- kinds of nodes

    def _input(self, node: fx.Node) -> OpNode:
        held = self.phase is not Phase.BACKWARD or node.op == "get_attr" or "primals" in node.name
        return OpNode(node.name, OpKind.INPUT, "input", storages=self._allocate(node, held=held))

    def _output(self, node: fx.Node) -> OpNode:
        for source in node.all_input_nodes:
            self._refuse_unwaited(source, "leaves the graph")
        return OpNode(node.name, OpKind.OUTPUT, "output", inputs=_inputs(node))

    def _wait(self, node: fx.Node) -> OpNode:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            raise GraphError(f"{node.name} waits for {source!r}, which is no value of the graph")
        launch = self._launch_of.get(source)
        if launch is not None and targets.runs_kernel(node.target):
            return self._finish(node, launch)
        storages = self._storages_of[source]
        for key in _storage_keys(node):
            if storages:
                self._storage_by_key.setdefault(key, storages[0])
        if launch is None:  # launched in another graph: nothing here may cross it
            return OpNode(node.name, OpKind.COMPUTE, str(node.target), _inputs(node), storages, opaque=True)
        return OpNode(node.name, OpKind.WAIT, str(node.target), _inputs(node), storages, launch=launch)

    def _finish(self, node: fx.Node, launch: str) -> OpNode:
        """A wait that makes a result of its own out of what has arrived and of what was sent."""
        _, *sent = node.all_input_nodes
        storages = self._allocate(node)
        return OpNode(
            name=node.name,
            kind=OpKind.WAIT,
            target=str(node.target),
            inputs=_inputs(node),
            storages=storages,
            dtype=_dtype(node),
            read_bytes=sum(_value_bytes(source) for source in sent),
            written_bytes=_value_bytes(node),
            launch=launch,
            kernel=True,
        )

    def _launch(self, node: fx.Node, kind: CollectiveKind) -> OpNode:
        for source in node.all_input_nodes:
            self._refuse_unwaited(source, f"is read by {node.name}")
        writes = self._writes(node)
        storages = writes or self._allocate(node)
        self._launch_of[node] = node.name
        return OpNode(
            name=node.name,
            kind=OpKind.LAUNCH,
            target=str(node.target),
            inputs=_inputs(node),
            storages=storages,
            writes=writes,
            dtype=_dtype(node),
            read_bytes=_sent_bytes(node),
            written_bytes=_value_bytes(node),
            collective=self._collective(node, kind),
            kernel=targets.runs_kernel(node.target),
        )

    def _call(self, node: fx.Node) -> OpNode:
        if (
            node.target is operator.getitem
            and isinstance(source := node.args[0], fx.Node)
            and source in self._launch_of
        ):
            self._launch_of[node] = self._launch_of[source]  # one result of a coalesced launch
            return OpNode(node.name, OpKind.VIEW, "getitem", _inputs(node), self._picked(node, source))
        for source in node.all_input_nodes:
            self._refuse_unwaited(source, f"is read by {node.name}")
        writes = self._writes(node)
        storages, is_view = self._result(node)
        if is_view and not writes:
            return OpNode(
                node.name,
                OpKind.VIEW,
                str(node.target),
                _inputs(node),
                storages,
                random=targets.draws_random(node.target),
                opaque=targets.is_opaque(node.target, self.pure),
            )
        return OpNode(
            name=node.name,
            kind=OpKind.COMPUTE,
            target=str(node.target),
            inputs=_inputs(node),
            storages=storages,
            writes=writes,
            category=targets.category(node.target),
            dtype=_dtype(node),
            flops=_flops(node),
            read_bytes=sum(_value_bytes(source) for source in node.all_input_nodes),
            written_bytes=_value_bytes(node),
            random=targets.draws_random(node.target),
            opaque=targets.is_opaque(node.target, self.pure),
        )

    # -- memory

    def _allocate(self, node: fx.Node, *, held: bool = False) -> tuple[int, ...]:
        """Storages of a node's tensors: known ones where a fake tensor shares one, else new ones."""
        found: list[int] = []
        for tensor in _tensors(node):
            key = tensor.untyped_storage()._cdata
            if key not in self._storage_by_key:
                self._storage_by_key[key] = len(self.storages)
                size_bytes = _concrete(tensor.untyped_storage().nbytes())
                self.storages.append(Storage(len(self.storages), size_bytes, node.name, held))
            found.append(self._storage_by_key[key])
        return tuple(dict.fromkeys(found))

    def _result(self, node: fx.Node) -> tuple[tuple[int, ...], bool]:
        """Storages of a result, and whether it allocates nothing (a view, a size, a part of another result)."""
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            return self._picked(node, node.args[0]), True
        aliased = self._aliased(node)
        if aliased:
            for key in _storage_keys(node):
                self._storage_by_key.setdefault(key, aliased[0])
            return aliased, True
        before = len(self.storages)
        storages = self._allocate(node)
        return storages, len(self.storages) == before

    def _aliased(self, node: fx.Node) -> tuple[int, ...]:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.returns or any(r.alias_info is None for r in schema.returns):
            return ()
        sets = set().union(*(r.alias_info.before_set for r in schema.returns))
        found: list[int] = []
        for argument, value in _arguments(schema, node):
            if argument.alias_info is not None and sets & set(argument.alias_info.before_set):
                found += [s for source in _nodes(value) for s in self._storages_of[source]]
        return tuple(dict.fromkeys(found))

    def _picked(self, node: fx.Node, source: fx.Node) -> tuple[int, ...]:
        keys = [self._storage_by_key[k] for k in _storage_keys(node) if k in self._storage_by_key]
        if keys:
            return tuple(dict.fromkeys(keys))
        return self._storages_of[source] if any(True for _ in _tensors(node)) else ()

    def _writes(self, node: fx.Node) -> tuple[int, ...]:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            return ()
        found = [
            storage
            for argument, value in _arguments(schema, node)
            if argument.alias_info is not None and argument.alias_info.is_write
            for source in _nodes(value)
            for storage in self._storages_of[source]
        ]
        return tuple(dict.fromkeys(found))

    # -- collectives

    def _collective(self, node: fx.Node, kind: CollectiveKind) -> Collective:
        named = {argument.name: value for argument, value in _arguments(node.target._schema, node)}  # type: ignore[union-attr]
        by_copy = targets.goes_by_copy(node.target, named.get("by_copy"))
        # A queue of its own in each direction: copies do not wait for the communicator, nor gathers for reductions.
        queue = f", {kind} by copy" if by_copy else ""
        group, size = self._group(node, f"{named.get('group_name')}{queue}", named.get("group_size"))
        note = (node.meta.get("custom") or {}).get(ANNOTATION) or {}
        if note.get("padded"):
            self.padded.add(node.name)
        return Collective(
            kind=kind,
            group=group,
            group_size=size,
            payload_bytes=max(_sent_bytes(node), _value_bytes(node)),
            dtype=_dtype(node),
            role=Role.ACTIVATION,
            unit=note.get("unit"),
            parameter=note.get("parameter"),
            by_copy=by_copy,
            direct=targets.goes_directly(node.target),
        )

    def _group(self, node: fx.Node, group_name: Any, group_size: Any) -> tuple[str, int]:
        key = str(group_name)
        if key not in self.group_sizes:
            size = group_size if isinstance(group_size, int) else _group_size(key, node.name)
            self.group_sizes[key] = (f"g{len(self.group_sizes)}", size)
        return self.group_sizes[key]

    def _refuse_unwaited(self, source: fx.Node, how: str) -> None:
        if source in self._launch_of:
            raise GraphError(
                f"{source.name} is the result of collective {self._launch_of[source]} and {how} before it was waited "
                "for: the graph was cut between launch and wait; compile with fullgraph=True"
            )


# -- small readers of torch's metadata


def _inputs(node: fx.Node) -> tuple[str, ...]:
    return tuple(source.name for source in node.all_input_nodes)


def _arguments(schema: Any, node: fx.Node) -> Iterable[tuple[Any, Any]]:
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            yield argument, node.args[position]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> Iterable[fx.Node]:
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, fx.Node))


def _tensors(node: fx.Node) -> Iterable[torch.Tensor]:
    value = node.meta.get("val", node.meta.get("example_value"))
    return (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


def _storage_keys(node: fx.Node) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in _tensors(node)]


def _value_bytes(node: fx.Node) -> int:
    return sum(_concrete(tensor.numel()) * tensor.element_size() for tensor in _tensors(node))


def _sent_bytes(launch: fx.Node) -> int:
    """What a collective is given, without the buffer that it is to fill (``out``, which may be all of its result)."""
    sources = (source for source in launch.all_input_nodes if source is not launch.kwargs.get("out"))
    return sum(_value_bytes(source) for source in sources)


def _extent(node: fx.Node) -> Extent:
    tensors = list(_tensors(node))
    elements = sum(_concrete(tensor.numel()) for tensor in tensors)
    return Extent(elements, tensors[0].element_size() if tensors else 0)


def _dtype(node: fx.Node) -> str:
    return next((str(tensor.dtype).removeprefix("torch.") for tensor in _tensors(node)), "")


def _concrete(size: Any) -> int:
    """A size as a number: the hint of a symbolic one, ``UNBACKED_SIZE`` where there is none."""
    if isinstance(size, int):
        return size
    symbolic = size.node
    return int(symbolic.hint) if symbolic.has_hint() else UNBACKED_SIZE


def _flops(node: fx.Node) -> int | None:
    formula = targets.flop_formula(node.target)
    if formula is None:
        known = targets.category(node.target) in (
            Category.POINTWISE,
            Category.REDUCTION,
            Category.COPY,
            Category.INDEX,
        )
        return 0 if known else None
    value = fx.node.map_arg(node.args, _meta_value)
    named = fx.node.map_arg(node.kwargs, _meta_value)
    return _concrete_flops(formula, value, named, node.meta.get("val"))


def _concrete_flops(formula: Callable[..., Any], args: Any, kwargs: Any, out: Any) -> int | None:
    try:
        return _concrete(formula(*args, out_val=out, **kwargs))
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ):  # not made for these arguments
        return None


def _meta_value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _group_size(group_name: str, op: str) -> int:
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return int(_resolve_process_group(group_name).size())
    except (RuntimeError, ValueError, KeyError) as error:
        raise GraphError(f"{op} communicates over process group {group_name!r}, which is not known here") from error
