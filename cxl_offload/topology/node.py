"""What a NUMA node is made of: zones, memory blocks, huge-page pools and where its memory lives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

EvidenceKind = Literal["cxl-region", "hmat-cpuless", "distance-cpuless"]


Pages = Literal["base", "thp", "2MiB", "1GiB"]
"""Pages that memory may have; thp: transparent huge pages."""


class NodeKind(str, Enum):
    """What the memory of a node is. ``GPU``: accelerator memory shown as a node (GH200, MI300A)."""

    DRAM = "dram"
    CXL = "cxl"
    GPU = "gpu"
    HBM = "hbm"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Zone:
    """A kernel memory zone of one node, e.g. ``Normal`` or ``Movable`` (/proc/zoneinfo)."""

    name: str
    managed_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Memory blocks of one node with the same state and zones (/sys/devices/system/memory).

    ``valid_zones`` is the kernel's own text: the zone of an online block, the zones it could go
    to while offline, ``none`` for a block that spans several, ``""`` where the file is absent.
    """

    state: str
    valid_zones: str
    blocks: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HugePagePool:
    """Explicit huge pages of one size on one node, in pages."""

    page_bytes: int
    total: int
    free: int
    surplus: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes of the pool that nobody holds."""
        return self.free * self.page_bytes


@dataclass(frozen=True, slots=True)
class CxlEvidence:
    """Why a node or a DAX device is taken for CXL memory.

    ``kind`` is ``cxl-region`` when the kernel's CXL driver names the region (certain),
    ``hmat-cpuless`` when a node without CPUs is slower than DRAM by the firmware's HMAT, and
    ``distance-cpuless`` when only its distance says so (weak: a memory-only node of a virtual
    machine looks the same).
    """

    kind: EvidenceKind
    detail: str
    region: str | None = None
    endpoint_decoders: tuple[str, ...] = ()
    memdevs: tuple[str, ...] = ()
    pci_addresses: tuple[str, ...] = ()
    dax: str | None = None
    interleave_ways: int | None = None
    interleave_granularity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class DaxDevice:
    """A Device-DAX instance.

    ``mode`` is ``devdax`` (a file to ``mmap``, no node) or ``system-ram`` (driver kmem: its
    memory is, or can be, online as ``target_node``); ``unbound`` when no driver has it.
    """

    name: str
    mode: Literal["devdax", "system-ram", "unbound"]
    size_bytes: int
    target_node: int | None = None
    align_bytes: int | None = None
    cxl: CxlEvidence | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node of the kernel, or of a simulated machine.

    Attributes
    ----------
    cpus
        CPU numbers, ascending; empty for memory without CPUs.
    capacity_bytes
        Memory the kernel (or the simulation) can hand out; 0 when offline or not published.
    free_bytes
        Free at the time of reading; ``None`` where that is unknown.
    page_cache_bytes
        Files that the kernel keeps there and drops before an allocation fails.
    allowed
        False when a cpuset or container forbids the node to this process.
    online
        False for a node that is only possible, or whose memory is not there.
    installed_bytes
        Physical memory behind the node, where known; more than ``capacity_bytes`` when part of
        it is offline, reserved or withheld.
    socket
        Physical package of its CPUs, or of the socket a CPU-less node hangs on, where known.
    gpu
        PCI address or name of the GPU that owns the memory, for ``NodeKind.GPU``.
    """

    id: int
    kind: NodeKind
    cpus: tuple[int, ...]
    capacity_bytes: int
    free_bytes: int | None = None
    allowed: bool = True
    online: bool = True
    installed_bytes: int | None = None
    socket: int | None = None
    llc_bytes: int | None = None
    zones: tuple[Zone, ...] = ()
    blocks: tuple[BlockGroup, ...] = ()
    huge_pages: tuple[HugePagePool, ...] = ()
    evidence: CxlEvidence | None = None
    gpu: str | None = None
    description: str = ""
    page_cache_bytes: int = 0

    def __post_init__(self) -> None:
        if self.id < 0 or self.capacity_bytes < 0:
            raise ValueError(
                f"node {self.id}: id and capacity ({self.capacity_bytes}) must not be negative"
            )
        if list(self.cpus) != sorted(set(self.cpus)):
            raise ValueError(f"node {self.id}: CPUs must be ascending and unique")

    @property
    def movable_bytes(self) -> int:
        """Bytes in ``ZONE_MOVABLE``: pages there leave the node when pinned for a long time."""
        return sum(zone.managed_bytes for zone in self.zones if zone.name == "Movable")

    @property
    def has_memory(self) -> bool:
        """Whether the node is online and holds any memory."""
        return self.online and self.capacity_bytes > 0
