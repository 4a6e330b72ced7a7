"""Simulated machines for fault tests, and the account that must be right after every fault."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.topology import HugePagePool, Machine, Node, NodeKind, Tier

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
PAGE = 4 * KIB
NODES = (0, 1, 2)
DISTANCES = {0: {0: 10, 1: 21, 2: 24}, 1: {0: 21, 1: 10, 2: 34}, 2: {0: 24, 1: 34, 2: 10}}


def machine(node_bytes: int, *, huge_2mib: int = 0, huge_1gib: int = 0) -> Machine:
    """Two sockets and a CPU-less node, each of ``node_bytes`` and these huge pages beside."""
    pools = (
        HugePagePool(page_bytes=2 * MIB, total=huge_2mib, free=huge_2mib),
        HugePagePool(page_bytes=GIB, total=huge_1gib, free=huge_1gib),
    )
    total = node_bytes + huge_2mib * 2 * MIB + huge_1gib * GIB
    nodes = tuple(
        Node(
            id=node,
            kind=NodeKind.CXL if node == 2 else NodeKind.DRAM,
            cpus=(node,) if node < 2 else (),
            capacity_bytes=total,
            huge_pages=pools,
        )
        for node in NODES
    )
    tiers = (Tier("ldram", (0,)), Tier("rdram", (1,)), Tier("cxl", (2,)))
    return Machine(name="ground", nodes=nodes, distances=DISTANCES, tiers=tiers, simulated=True)


def simulated(
    node_bytes: int,
    *,
    huge_2mib: int = 0,
    huge_1gib: int = 0,
    driver: _C.GpuDriver | None = None,
    limits: dict[int, int] | None = None,
    max_threads: int | None = None,
) -> Session:
    return Session.simulated(
        machine(node_bytes, huge_2mib=huge_2mib, huge_1gib=huge_1gib),
        driver=driver,
        limits=limits,
        max_threads=max_threads,
    )


def kernel_of(session: Session) -> _C.SimulatedKernel:
    assert isinstance(session.kernel, _C.SimulatedKernel)
    return session.kernel


def node_use(session: Session) -> dict[int, int]:
    """What the session says it holds on each node."""
    return {node: use.current_bytes for node, use in session.stats().nodes.items() if use}


@dataclass(frozen=True, slots=True)
class Account:
    """What a session holds for its callers; a failed call must not change it."""

    asked_bytes: int
    held_bytes: int
    allocations: int

    @classmethod
    def of(cls, session: Session) -> Account:
        stats = session.stats()
        return cls(stats.asked_bytes.current, stats.held_bytes.current, stats.allocations.current)


def check_against_kernel(session: Session, blocks: Iterable[_C.Allocation]) -> None:
    """The session's bytes per node, the kernel's, and those of the blocks' pages agree.

    Only for sessions without blocks of first touch, whose pages nobody counts.
    """
    kernel = kernel_of(session)
    used = {node: kernel.used_bytes(node) for node in NODES}
    said = node_use(session)
    assert {node: said.get(node, 0) for node in NODES} == used
    stats = session.stats()
    assert stats.mapped_bytes.current == sum(used.values())
    assert stats.held_bytes.current + stats.cached_bytes.current <= stats.mapped_bytes.current
    live: Counter[int] = Counter()
    for block in blocks:
        live.update(block.bytes_per_node())
    assert live[-1] == 0
    for node in NODES:
        assert live[node] <= used[node]


def check_all_returned(session: Session) -> None:
    """With every block dropped and the pools trimmed nothing is left anywhere."""
    session.trim()
    kernel = kernel_of(session)
    assert Account.of(session) == Account(0, 0, 0)
    stats = session.stats()
    assert (stats.mapped_bytes.current, stats.cached_bytes.current) == (0, 0)
    assert all(use.current_bytes == 0 for use in stats.nodes.values())
    assert [kernel.used_bytes(node) for node in NODES] == [0, 0, 0]
    assert kernel.mapping_count == 0


def stamp(block: _C.Allocation, value: int) -> None:
    """Writes at the beginning, the end and every 8 MiB of a block."""
    for offset in _places(block):
        ctypes.c_uint64.from_address(block.address + offset).value = value ^ offset


def has_stamp(block: _C.Allocation, value: int) -> bool:
    return all(
        ctypes.c_uint64.from_address(block.address + offset).value == value ^ offset
        for offset in _places(block)
    )


def _places(block: _C.Allocation) -> list[int]:
    if block.nbytes < 8:
        return []
    last = (block.nbytes - 8) // 8 * 8
    return sorted({*range(0, last, 8 * MIB), last})
