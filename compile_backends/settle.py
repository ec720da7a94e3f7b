"""After Inductor's fusion: every kernel back to where the plan needs it.

Inductor sorts fused kernels by their *first* member and pulls whatever they read in front of them. Where a gradient computed
early is fused with one computed late (coalesced reductions let both wait for the same launch), the whole computation
between the two is then pulled forward, past the launches and waits that were planned among it.

Here a fused kernel stands where its last member was planned, or before its first reader if that comes earlier; what was not
fused keeps its place.
"""

from __future__ import annotations

import heapq
from typing import Any

__all__ = ["settle"]


def settle(nodes: list[Any]) -> list[Any]:
    """A topological order of Inductor's scheduler nodes that follows the plan.

    Args:
        nodes: ``BaseSchedulerNode``s after fusion, topologically sorted; each knows the place of its last member
            (``max_order``) in the order that the graph was lowered in.
    """
    makers = {name: index for index, node in enumerate(nodes) for name in node.get_buffer_names()}
    sources = [
        {makers[dep.name] for dep in node.unmet_dependencies if dep.name in makers} - {index}
        for index, node in enumerate(nodes)
    ]
    keys = [node.max_order for node in nodes]
    for index in reversed(range(len(nodes))):
        for source in sources[index]:
            keys[source] = min(keys[source], keys[index])
    order = _sorted(sources, keys)
    # A cycle would be a fault of the fusion; Inductor's own order is then as good as any.
    return [nodes[index] for index in order] if len(order) == len(nodes) else nodes


def _sorted(sources: list[set[int]], keys: list[int]) -> list[int]:
    """Topological order, by key among what is ready."""
    readers: list[list[int]] = [[] for _ in sources]
    missing = [len(found) for found in sources]
    for index, found in enumerate(sources):
        for source in found:
            readers[source].append(index)
    ready = [(keys[index], index) for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    return order
