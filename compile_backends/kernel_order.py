"""Fused kernels where the plan wants them.

Inductor lets a fused kernel run where its first member stood, and pulls ahead of it whatever it needs, waits included::

    planned     p · launch a · matmul · wait b · q(p, b)
    Inductor    wait b · p+q · launch a · matmul
    here        launch a · matmul · wait b · p+q

What was fused stays fused: only the order of kernels, launches and waits changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch._inductor import custom_graph_pass

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

__all__ = ["KernelOrder", "in_planned_order"]


def in_planned_order(nodes: Sequence[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Each kernel as late as its last member was planned, but ahead of everything that reads it.

    Args:
        nodes: kernels in any legal order; ``max_order`` is the planned place of a kernel's last member.
    """
    maker = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    place = [node.max_order for node in nodes]
    for index in reversed(range(len(nodes))):
        for dependency in nodes[index].unmet_dependencies:
            source = maker.get(dependency.name, index)
            place[source] = min(place[source], place[index])
    # No kernel's place is behind that of a reader, and equal places keep the legal order: so is the result.
    return [nodes[index] for index in sorted(range(len(nodes)), key=place.__getitem__)]


class KernelOrder(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """Inductor's pass between fusion and code, behind the user's own if there is one."""

    def __init__(self, users: Callable[[Any], Any] | None) -> None:
        self._users = users

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        return in_planned_order(nodes if self._users is None else self._users(nodes))

    def uuid(self) -> Any:
        if self._users is None:
            return "overlap-kernel-order"
        users = self._users.uuid() if hasattr(self._users, "uuid") else None
        return None if users is None else ("overlap-kernel-order", users)
