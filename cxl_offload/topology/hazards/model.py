"""A hazard, and what the checks look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cxl_offload.topology.health import MachineHealth
from cxl_offload.topology.model import Machine
from cxl_offload.topology.node import Node, NodeKind
from cxl_offload.topology.tree import Tree

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Worst first: a promise cannot be kept; speed or memory is lost; good to know."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One thing that will hurt.

    Attributes
    ----------
    name
        Stable, for scripts: ``numa-balancing``, ``movable-zone``, ...
    found
        What is so on this machine, with the value.
    cost
        What it costs a program that keeps tensors in tiers.
    remedy
        The command that fixes it, as it can be pasted: what else there is to say stands behind
        ``  # ``. Or what to change, where no command can.
    source
        The file that says so, and the document that says what it means.
    """

    name: str
    severity: Severity
    found: str
    cost: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True)
class Scene:
    """A machine, the tree it was read from, what it has counted, and what was tried on it."""

    machine: Machine
    tree: Tree
    health: MachineHealth
    placing_refused: str | None = None
    tried: bool = False

    @property
    def memory_nodes(self) -> tuple[Node, ...]:
        """Nodes with memory that is not a GPU's, allowed or not."""
        nodes = self.machine.nodes
        return tuple(node for node in nodes if node.has_memory and node.kind is not NodeKind.GPU)

    @property
    def cxl_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.memory_nodes if node.kind is NodeKind.CXL)

    def nearest_cpus(self, node: Node) -> int | None:
        """The node with CPUs that is nearest to ``node``, if the distances single one out."""
        if node.cpus:
            return node.id
        by_distance: dict[int, list[int]] = {}
        for other in self.machine.nodes:
            distance = self.machine.distance(other.id, node.id)
            if other.cpus and distance is not None:
                by_distance.setdefault(distance, []).append(other.id)
        nearest = by_distance[min(by_distance)] if by_distance else []
        return nearest[0] if len(nearest) == 1 else None
