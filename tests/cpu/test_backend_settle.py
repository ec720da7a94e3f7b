"""The order of fused kernels: each test is a small picture of what Inductor hands over."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

from compile_backends.settle import settle


@dataclass(eq=False)
class Kernel:
    """As much of a scheduler node as the pass looks at: it makes one buffer, called as itself."""

    name: str
    max_order: int
    reads: tuple[str, ...] = ()
    unmet_dependencies: list[SimpleNamespace] = field(init=False)

    def __post_init__(self) -> None:
        self.unmet_dependencies = [SimpleNamespace(name=name) for name in self.reads]

    def get_buffer_names(self) -> list[str]:
        return [self.name]


def names(nodes: list[Kernel]) -> list[str]:
    return [node.name for node in settle(nodes)]


def test_what_was_not_fused_keeps_its_place() -> None:
    assert names(
        [Kernel("launch", 0), Kernel("mm", 1), Kernel("wait", 2, ("launch",)), Kernel("use", 3, ("wait",))]
    ) == [
        "launch",
        "mm",
        "wait",
        "use",
    ]


def test_a_kernel_fused_of_an_early_and_a_late_op_goes_where_the_late_one_was() -> None:
    """casts = {cast of g0 (1), cast of g1 (5)}, read by the reduction (6). By its first member it would stand at 1 and pull
    mm1 (4) and what mm1 reads in front of the wait (2) and the matmul (3) that were planned before it."""
    handed_over = [
        Kernel("g0", 0),
        Kernel("mm1", 4),
        Kernel("casts", 5, ("g0", "mm1")),
        Kernel("wait", 2),
        Kernel("mm", 3, ("wait",)),
        Kernel("reduction", 6, ("casts",)),
    ]
    assert names(handed_over) == ["g0", "wait", "mm", "mm1", "casts", "reduction"]


def test_a_fused_kernel_runs_before_its_first_reader_even_if_its_last_member_was_planned_later() -> None:
    """both = {d_gate (1), d_up (4)}; the matmul of d_gate (2) was planned before a wait (3)."""
    handed_over = [Kernel("x", 0), Kernel("both", 4, ("x",)), Kernel("mm", 2, ("both",)), Kernel("wait", 3)]
    assert names(handed_over) == ["x", "both", "mm", "wait"]


def test_dependencies_come_first_whatever_the_plan_says() -> None:
    assert names([Kernel("a", 5), Kernel("b", 1, ("a",))]) == ["a", "b"]


def test_buffers_of_other_graphs_are_not_waited_for() -> None:
    assert names([Kernel("a", 1, ("primals_1",)), Kernel("b", 0)]) == ["b", "a"]
