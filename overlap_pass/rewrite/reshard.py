"""The partitioner of ``reshard="auto"``: the budget decides which gathered parameters stay from forward to backward.

A copy of the joint graph is cut with every parameter gathered twice; the two graphs are what the decision
(``schedule.resharding``) is made for, and the joint graph is tagged and cut accordingly.
"""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import replace
from typing import Any

import torch.fx as fx

from overlap_pass.cost.hardware import Hardware
from overlap_pass.graph.program import Phase, Program
from overlap_pass.graph.read import read_program
from overlap_pass.memory.budget import Absolute, Budget, Unlimited
from overlap_pass.rewrite.partition import prepare_joint, split
from overlap_pass.rewrite.recompute import asked_to_keep, tag_gathers
from overlap_pass.rewrite.transport import copied
from overlap_pass.schedule.resharding import Resharding, choose_kept
from overlap_pass.transport.choice import Carriers

__all__ = ["PartitionByBudget"]

_log = logging.getLogger("overlap_pass")


class PartitionByBudget:
    """A ``partition_fn`` for AOTAutograd that remembers what it decided.

    Attributes:
        decision: ``None`` until a joint graph was cut.
    """

    def __init__(self, hardware: Hardware, budget: Budget, carriers: Carriers) -> None:
        self._hardware, self._budget, self._carriers = hardware, budget, carriers
        self.decision: Resharding | None = None

    def __call__(
        self, joint: fx.GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        prepare_joint(joint.graph)
        return self.split(joint, joint_inputs, **options)

    def split(self, joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut a prepared joint graph in two."""
        asked = asked_to_keep(joint.graph)
        tag_gathers(joint.graph, kept=())
        with warnings.catch_warnings():  # torch copies what it calls deprecated itself
            warnings.simplefilter("ignore", FutureWarning)
            trial = fx.GraphModule(joint, copy.deepcopy(joint.graph))
        forward, backward = split(trial, joint_inputs, **options)
        self.decision = choose_kept(
            self._read(forward.graph, Phase.FORWARD),
            self._read(backward.graph, Phase.BACKWARD),
            self._hardware,
            self._budget,
            asked=asked,
        )
        _log.info("reshard: %s", self.decision.summary())
        if not self.decision.kept:
            return forward, backward
        tag_gathers(joint.graph, kept=self.decision.kept)
        return split(joint, joint_inputs, **options)

    def _read(self, graph: fx.Graph, phase: Phase) -> Program:
        """The graph, with the staging memory and the lane of what will go by copy; names are those of the joint graph."""
        program = read_program(graph, phase, name=phase.value)
        names = copied(graph, self._carriers)
        ops = tuple(
            replace(op, collective=replace(op.collective, by_copy=True)) if op.collective and op.name in names else op
            for op in program.ops
        )
        return replace(program, ops=ops)

    def setting(self) -> tuple[tuple[str, str], ...]:
        """(name, value) pairs for a report."""
        if self.decision is None:
            return (("reshard", "auto"),)
        found = self.decision
        some = 0 < len(found.kept) < found.gathered
        kept = (("kept", ", ".join(found.names)),) if some else ()
        return (("reshard", f"auto: {found.summary()}"), *kept)

    @property
    def budget(self) -> Budget:
        """The budget of the step in bytes; for a graph that was not cut the one given."""
        if self.decision is None:
            return self._budget
        size_bytes = self.decision.budget_bytes
        return Unlimited() if size_bytes is None else Absolute(size_bytes)
