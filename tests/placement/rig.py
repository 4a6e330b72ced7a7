"""A machine under test: the simulated kernel, the host's Linux, or a guest's."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.topology import Machine, Node, NodeKind, Tier, discover
from tests.placement.child import MIB, stranger_filling
from tests.placement.kernel_calls import (
    NODES,
    PAGE,
    available_bytes,
    mappings_over,
    meminfo_bytes,
    page_nodes,
)
from tests.vm.harness.machine import MachineSpec, load, names

__all__ = ["MACHINE_UNDER_TEST", "Rig", "node_sets", "open_rig", "rig_names", "simulated_machine"]

MACHINE_UNDER_TEST = os.environ.get("CXL_OFFLOAD_TEST_MACHINE")
"""The name of the machine whose guest this process runs in; None on the host."""

HUGE = 2 * MIB


class Rig(Protocol):
    """What the contract needs to know and to do.

    ``is_ours``: its memory may be filled up and its huge-page pools changed.
    """

    session: Session
    nodes: tuple[int, ...]
    nodes_with_cpus: tuple[int, ...]
    distances: Mapping[int, Mapping[int, int]]
    is_ours: bool

    def page_nodes(self, address: int, nbytes: int) -> list[int]: ...
    def mappings_over(self, address: int, nbytes: int) -> int: ...
    def free_bytes(self, node: int) -> int: ...
    def filled(self, node: int, *, leave_bytes: int) -> AbstractContextManager[object]: ...
    def set_pool(self, node: int, pages: int) -> None: ...
    def free_in_pool(self, node: int) -> int: ...


@functools.cache
def _this_machine() -> Machine:
    """Read once: a tenth of a second in a guest."""
    return discover()


class LinuxRig:
    """This machine's kernel. ``spec`` is the guest's own description; None on the host."""

    def __init__(self, spec: MachineSpec | None) -> None:
        self.session = Session.linux(_this_machine())
        self.is_ours = spec is not None
        if spec is not None:
            self.nodes = spec.node_ids
            self.nodes_with_cpus = tuple(node.id for node in spec.nodes if node.cpus)
            self.distances = spec.distance_table()
        else:
            online = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*")) or [0]
            self.nodes = tuple(n for n in online if meminfo_bytes(n, "MemTotal")) or (0,)
            self.nodes_with_cpus = tuple(
                n for n in online if (NODES / f"node{n}/cpulist").read_text().strip()
            )
            rows = {n: (NODES / f"node{n}/distance").read_text().split() for n in online}
            self.distances = {
                n: dict(zip(online, map(int, row), strict=True)) for n, row in rows.items()
            }

    def page_nodes(self, address: int, nbytes: int) -> list[int]:
        return page_nodes(address, nbytes)

    def mappings_over(self, address: int, nbytes: int) -> int:
        return mappings_over(address, nbytes)

    def free_bytes(self, node: int) -> int:
        return available_bytes(node)

    def filled(self, node: int, *, leave_bytes: int) -> AbstractContextManager[object]:
        return stranger_filling(node, leave_bytes=leave_bytes)

    def _pool(self, node: int) -> Path:
        return NODES / f"node{node}/hugepages/hugepages-2048kB"

    def set_pool(self, node: int, pages: int) -> None:
        (self._pool(node) / "nr_hugepages").write_text(str(pages))
        granted = int((self._pool(node) / "nr_hugepages").read_text())
        assert granted == pages, f"node {node} gave {granted} huge pages of {pages}"

    def free_in_pool(self, node: int) -> int:
        return int((self._pool(node) / "free_hugepages").read_text())


class SimulatedRig:
    """The machine of a YAML file, on the simulated kernel."""

    is_ours = True

    def __init__(self, spec: MachineSpec) -> None:
        self.session = Session.simulated(simulated_machine(spec))
        self.nodes = spec.node_ids
        self.nodes_with_cpus = (self.session.machine.initiator,)
        self.distances = spec.distance_table()

    def page_nodes(self, address: int, nbytes: int) -> list[int]:
        # Halves of what is not all on one node, down to single pages.
        shares = self.session.bytes_per_node(address, nbytes)
        if len(shares) == 1:
            return [*shares] * (nbytes // PAGE)
        half = nbytes // PAGE // 2 * PAGE
        rest = self.page_nodes(address + half, nbytes - half)
        return self.page_nodes(address, half) + rest

    def mappings_over(self, address: int, nbytes: int) -> int:
        return mappings_over(address, nbytes)

    def free_bytes(self, node: int) -> int:
        return self.session.kernel.node_headroom(node, _C.PageKind.base).free_bytes

    @contextlib.contextmanager
    def filled(self, node: int, *, leave_bytes: int) -> Iterator[None]:
        self.session.kernel.set_used_by_others(node, self.free_bytes(node) - leave_bytes)
        yield
        self.session.kernel.set_used_by_others(node, 0)

    def set_pool(self, node: int, pages: int) -> None:
        self.session.kernel.set_pool(node, HUGE, pages)

    def free_in_pool(self, node: int) -> int:
        headroom = self.session.kernel.node_headroom(node, _C.PageKind.huge_2mib)
        return headroom.free_bytes // HUGE


def rig_names() -> list[str]:
    if MACHINE_UNDER_TEST is not None:
        return [MACHINE_UNDER_TEST]
    return ["host", *(f"simulated-{name}" for name in names())]


def open_rig(name: str) -> Rig:
    if name == "host":
        return LinuxRig(None)
    if name.startswith("simulated-"):
        return SimulatedRig(load(name.removeprefix("simulated-")))
    return LinuxRig(load(name))


def simulated_machine(spec: MachineSpec) -> Machine:
    return Machine(
        name=spec.name,
        nodes=tuple(
            Node(node.id, NodeKind(node.kind), spec.cpu_numbers(node.id), node.memory_bytes)
            for node in spec.nodes
        ),
        distances={first: dict(row) for first, row in spec.distance_table().items()},
        tiers=tuple(Tier(name, nodes) for name, nodes in spec.tiers().items()),
        initiator=0,
        simulated=True,
    )


def node_sets(name: str) -> list[tuple[int, ...]]:
    """Node sets worth a test: every single node, every pair with the last one, all of them.

    Known without opening the machine, because they are part of the names of the tests.
    """
    if name == "host":
        listed = (NODES / "has_memory").read_text() if (NODES / "has_memory").exists() else "0"
        ids = [
            node
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", listed)
            for node in range(int(first), int(last or first) + 1)
        ]
    else:
        ids = list(load(name.removeprefix("simulated-")).node_ids)
    singles = [(node,) for node in ids]
    pairs = [(node, ids[-1]) for node in ids[:-1]]
    backwards = [tuple(reversed(ids))] if len(ids) > 2 else []
    return [*singles, *pairs, *([tuple(ids)] if len(ids) > 2 else []), *backwards]
