"""After Inductor's fusion: every kernel back to where the plan needs it.

Inductor sorts fused kernels by their *first* member and pulls whatever they read in front of them. Where a gradient computed
early is fused with one computed late (coalesced reductions let both wait for the same launch), the whole computation
between the two is then pulled forward, past the launches and waits that were planned among it.

Here a fused kernel stands where its last member was planned, or before its first reader if that comes earlier; what was not
fused keeps its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

__all__ = ["Settle", "settle"]


def settle(nodes: Sequence[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """A topological order of Inductor's scheduler nodes that follows the plan.

    Args:
        nodes: kernels after fusion in any legal order; each knows the place of its last member (``max_order``) in the
            order that the graph was lowered in.
    """
    maker = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    place = [node.max_order for node in nodes]
    for index in reversed(range(len(nodes))):
        for dependency in nodes[index].unmet_dependencies:
            source = maker.get(dependency.name, index)
            place[source] = min(place[source], place[index])
    # No place is behind that of a reader, and equal places keep the legal order: the result is legal too.
    return [nodes[index] for index in sorted(range(len(nodes)), key=place.__getitem__)]


class Settle(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """Inductor's pass between fusion and code, behind the user's own if there is one."""

    def __init__(self, users: Callable[[Any], Any] | None, uuid: str) -> None:
        self._users, self._uuid = users, uuid

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return settle(nodes if self._users is None else self._users(nodes))

    def uuid(self) -> Any:
        if self._users is None:
            return self._uuid
        users = self._users.uuid() if hasattr(self._users, "uuid") else None
        return None if users is None else (self._uuid, users)
