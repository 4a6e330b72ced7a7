"""What a virtual machine is: read from a YAML file, and the truth that its tests expect.

The same files describe the simulated machines of the placement contract, so that one description
is checked against a simulation and against a real kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.vm.harness.errors import HarnessError

__all__ = ["MACHINES", "CxlDevice", "MachineSpec", "NodeSpec", "load", "names"]

MACHINES = Path(__file__).resolve().parents[1] / "machines"
"""The folder with one file for each machine."""

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One NUMA node. ``cpus`` is a number of CPUs; 0 for memory only."""

    id: int
    cpus: int
    memory_bytes: int
    kind: str
    tier: str
    near: int | None = None
    gigantic_pages: int = 0
    evidence: str | None = None


@dataclass(frozen=True, slots=True)
class CxlDevice:
    """A type-3 device whose memory becomes ``node``, by this ``memhp_default_state``."""

    node: int
    online: str


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """A machine as its file says.

    ``latency_ns[i][j]`` and ``bandwidth_mb_per_s[i][j]`` are of the CPUs of node i on the memory
    of node j; ``distances[i][j]`` is the kernel's, and empty where the file gives none. ``tests``
    are arguments of pytest: what runs in this machine, in this order.
    """

    name: str
    kernel: str
    sockets: int
    nodes: tuple[NodeSpec, ...]
    distances: tuple[tuple[int, ...], ...]
    latency_ns: Mapping[int, Sequence[int]]
    bandwidth_mb_per_s: Mapping[int, Sequence[int]]
    cxl: CxlDevice | None
    tests: tuple[str, ...]

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.nodes)

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)

    @property
    def boot_nodes(self) -> tuple[NodeSpec, ...]:
        """The nodes that are there when the kernel starts: all but the CXL device's."""
        return tuple(node for node in self.nodes if self.cxl is None or node.id != self.cxl.node)

    def node(self, node_id: int) -> NodeSpec:
        return next(node for node in self.nodes if node.id == node_id)

    def cpu_numbers(self, node_id: int) -> tuple[int, ...]:
        """CPUs are numbered in the order of the nodes."""
        first = sum(node.cpus for node in self.nodes if node.id < node_id)
        return tuple(range(first, first + self.node(node_id).cpus))

    def distance_table(self) -> dict[int, dict[int, int]]:
        """Distances by node; where the file gives none, the kernel's own: 10, and 20 elsewhere."""
        rows = self.distances or tuple(
            tuple(10 if first == second else 20 for second in self.node_ids)
            for first in self.node_ids
        )
        return {
            first: dict(zip(self.node_ids, row, strict=True))
            for first, row in zip(self.node_ids, rows, strict=True)
        }

    def tiers(self) -> dict[str, tuple[int, ...]]:
        """Tier to nodes, the nodes of a tier in ascending order."""
        found: dict[str, tuple[int, ...]] = {}
        for node in self.nodes:
            found[node.tier] = (*found.get(node.tier, ()), node.id)
        return found


def names() -> list[str]:
    """All machines, in alphabetical order."""
    return sorted(path.stem for path in MACHINES.glob("*.yaml"))


def load(name: str) -> MachineSpec:
    """The machine of this name.

    Raises
    ------
    HarnessError
        If there is none, or its file does not describe one.
    """
    path = MACHINES / f"{name}.yaml"
    if not path.exists():
        raise HarnessError(f"no machine {name!r}; there are {', '.join(names())}")
    try:
        return _parse(name, yaml.safe_load(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise HarnessError(f"{path.name}: {error!r}") from error


def _parse(name: str, document: dict[str, Any]) -> MachineSpec:
    hmat = document["hmat"]
    nodes = tuple(_node(entry) for entry in document["nodes"])
    cxl = document.get("cxl")
    return MachineSpec(
        name=name,
        kernel=document["kernel"],
        sockets=document["sockets"],
        nodes=tuple(sorted(nodes, key=lambda node: node.id)),
        distances=tuple(tuple(row) for row in document.get("distances", ())),
        latency_ns=hmat["latency_ns"],
        bandwidth_mb_per_s=hmat["bandwidth_mb_per_s"],
        cxl=CxlDevice(**cxl) if cxl else None,
        tests=tuple(document["tests"]),
    )


def _node(entry: dict[str, Any]) -> NodeSpec:
    fields = dict(entry)
    memory = fields.pop("memory_mib") * MIB
    if memory % (128 * MIB):
        raise ValueError(f"node {fields['id']}: memory comes in blocks of 128 MiB")
    return NodeSpec(memory_bytes=memory, **fields)
