"""The machine as the rest of the package sees it: frozen data, no file is read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from cxl_offload.topology.links import Access, DmaPath, Drive, Gpu, Link
from cxl_offload.topology.node import (
    BlockGroup,
    CxlEvidence,
    DaxDevice,
    EvidenceKind,
    HugePagePool,
    Node,
    NodeKind,
    Zone,
)

__all__ = [
    "TIER_NAMES",
    "Access",
    "BlockGroup",
    "Citation",
    "CxlEvidence",
    "DaxDevice",
    "DmaPath",
    "Drive",
    "EvidenceKind",
    "Fact",
    "Gpu",
    "HugePagePool",
    "Limits",
    "Link",
    "Machine",
    "Node",
    "NodeKind",
    "Tier",
    "Variant",
    "Zone",
]

TIER_NAMES = ("ldram", "rdram", "cxl", "hbm", "nvme")
"""``ldram`` DRAM of the initiator's socket, ``rdram`` of the others, ``nvme`` a drive, no node."""

Variant = dict[str, str | int | bool]


NO_PATH_DISTANCE = 255
"""ACPI's distance between nodes without a path."""

MOST_CPUS = 8192
"""As many as a kernel of Linux is built for at most (CONFIG_NR_CPUS)."""

MAX_WEIGHT = 255
"""The kernel's own bound for an interleave weight; larger ratios make cycles of many GiB."""


@dataclass(frozen=True, slots=True)
class Tier:
    """An ordered class of nodes, fastest first. ``nvme`` has none."""

    name: str
    nodes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.name not in TIER_NAMES:
            raise ValueError(f"tier {self.name!r} is unknown; tiers are {', '.join(TIER_NAMES)}")
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"tier {self.name}: a node appears twice in {self.nodes}")


@dataclass(frozen=True, slots=True)
class Limits:
    """What cpuset, cgroup and rlimit leave to this process; ``None``: no limit, or not readable.

    The cgroup numbers are those of the group with the least room on the way to the root;
    ``cgroup_high_bytes`` throttles, ``cgroup_max_bytes`` kills. ``cgroup_current_bytes`` counts
    page cache too, part of which the kernel would give back.
    """

    mems_allowed: tuple[int, ...] | None = None
    cpus_allowed: tuple[int, ...] | None = None
    cgroup_version: Literal[1, 2] | None = None
    cgroup_path: str | None = None
    cgroup_max_bytes: int | None = None
    cgroup_high_bytes: int | None = None
    cgroup_current_bytes: int | None = None
    memlock_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A published number that fits no field, e.g. a ratio; the suffix of ``name`` is its unit."""

    name: str
    value: float
    source: str


@dataclass(frozen=True, slots=True)
class Citation:
    """Where one number of a machine file comes from.

    ``source`` is a table or section of the paper that :attr:`Machine.source` names. ``status``
    is ``printed`` there, ``derived`` (arithmetic, ``note`` has it) or ``assumed`` (``note`` has
    the reason); ``bound`` is ``upper`` or ``lower`` for a limit.
    """

    what: str
    value: str
    status: Literal["printed", "derived", "assumed"]
    source: str
    note: str = ""
    bound: Literal["upper", "lower"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes, how they are reached, GPUs, tiers and limits of one machine.

    Built by :func:`cxl_offload.topology.discover` or :func:`cxl_offload.topology.load_machine`.

    Attributes
    ----------
    distances
        ``distances[i][j]``: the kernel's distance from node ``i`` to ``j`` (10 = local); rows of
        offline nodes are missing, and a machine file may have none.
    initiator
        The node from whose CPUs the tiers are named; see :func:`cxl_offload.topology.seen_from`.
    simulated
        True for a machine file: no page of it exists.
    variant
        The choices taken in a machine file with several settings, e.g. ``{"snc": 4}``.
    """

    name: str
    nodes: tuple[Node, ...]
    distances: dict[int, dict[int, int]] = field(default_factory=dict)
    accesses: tuple[Access, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    tiers: tuple[Tier, ...] = ()
    dax: tuple[DaxDevice, ...] = ()
    limits: Limits = Limits()
    simulated: bool = False
    source: str = ""
    initiator: int = 0
    dma_paths: tuple[DmaPath, ...] = ()
    drives: tuple[Drive, ...] = ()
    facts: tuple[Fact, ...] = ()
    variant: Variant = field(default_factory=dict)
    citations: tuple[Citation, ...] = ()
    notes: tuple[str, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        ids = [node.id for node in self.nodes]
        if not ids or ids != sorted(set(ids)):
            raise ValueError(f"machine {self.name}: node ids must be ascending and unique: {ids}")
        gpu_names = [gpu.name for gpu in self.gpus]
        if len(set(gpu_names)) != len(gpu_names):
            raise ValueError(f"machine {self.name}: two GPUs share a name: {gpu_names}")
        self._check_nodes("initiator", [self.initiator])
        for access in self.accesses:
            self._check_nodes("an access", [access.initiator, access.target])
        for tier in self.tiers:
            self._check_nodes(f"tier {tier.name}", tier.nodes)
        for gpu in self.gpus:
            named = [node for node in (gpu.node, gpu.memory_node) if node is not None]
            self._check_nodes(f"GPU {gpu.name}", named)
        for row, columns in self.distances.items():
            self._check_nodes("a distance", [row, *columns])
        for path in self.dma_paths:
            self._check_nodes("a DMA path", [path.node])
            self.gpu(path.gpu)

    def _check_nodes(self, where: str, wanted: Iterable[int]) -> None:
        known = {node.id for node in self.nodes}
        missing = sorted(set(wanted) - known)
        if missing:
            raise ValueError(
                f"machine {self.name}: {where} names node {missing[0]}, "
                f"but the nodes are {', '.join(map(str, sorted(known)))}"
            )

    def node(self, node_id: int) -> Node:
        """The node with this id.

        Raises
        ------
        ValueError
            If the machine has no such node.
        """
        found = next((node for node in self.nodes if node.id == node_id), None)
        return found or self._has_no("node", node_id, (node.id for node in self.nodes))

    def tier(self, name: str) -> Tier:
        """The tier of this name.

        Raises
        ------
        ValueError
            If the machine has no such tier.
        """
        found = next((tier for tier in self.tiers if tier.name == name), None)
        return found or self._has_no("tier", name, (tier.name for tier in self.tiers))

    def tier_of(self, node_id: int) -> Tier | None:
        """The tier that holds this node, if any."""
        return next((tier for tier in self.tiers if node_id in tier.nodes), None)

    def bytes_per_tier(self, per_node: Mapping[int, int]) -> dict[str, int]:
        """Bytes of nodes by the name of their tier; those of nodes without one are left out."""
        found: dict[str, int] = {}
        for node, nbytes in per_node.items():
            if (tier := self.tier_of(node)) is not None:
                found[tier.name] = found.get(tier.name, 0) + nbytes
        return found

    def gpu(self, name: str) -> Gpu:
        """The GPU of this name or PCI address.

        Raises
        ------
        ValueError
            If the machine has no such GPU.
        """
        found = next((gpu for gpu in self.gpus if name in (gpu.name, gpu.pci_address)), None)
        return found or self._has_no("GPU", name, (gpu.name for gpu in self.gpus))

    def _has_no(self, what: str, wanted: object, known: Iterable[object]) -> NoReturn:
        names = ", ".join(map(str, known)) or "none"
        raise ValueError(f"machine {self.name} has no {what} {wanted!r}; its {what}s are {names}")

    def usable_nodes(self, *, include_gpu_memory: bool = False) -> tuple[Node, ...]:
        """Nodes that may hold tensors: online, allowed, with memory.

        GPU memory that shows up as a node (GH200, MI300A) is left out unless asked for: the GPU's
        own allocator needs it, and taking it would silently shrink what the GPU can hold.
        """
        return tuple(
            node
            for node in self.nodes
            if node.has_memory
            and node.allowed
            and (include_gpu_memory or node.kind is not NodeKind.GPU)
        )

    def access(self, initiator: int, target: int) -> Access | None:
        """What is known about CPUs of ``initiator`` on memory of ``target``."""
        pair = (initiator, target)
        return next((a for a in self.accesses if (a.initiator, a.target) == pair), None)

    def distance(self, initiator: int, target: int) -> int | None:
        """The kernel's distance, or ``None`` where it is not known."""
        return self.distances.get(initiator, {}).get(target)

    def dma_path(self, gpu: Gpu | str, node_id: int) -> DmaPath | None:
        """The measured or published path of copies between ``gpu`` and a node, if any."""
        name = self.gpu(gpu).name if isinstance(gpu, str) else gpu.name
        return next((p for p in self.dma_paths if (p.gpu, p.node) == (name, node_id)), None)

    def dma_bandwidth(
        self, gpu: Gpu | str, node_id: int, *, direction: Literal["h2d", "d2h"] = "h2d"
    ) -> float | None:
        """Bytes/s that a node delivers to (``h2d``) or takes from (``d2h``) a GPU's copies.

        It is separate from what CPUs reach on that node, and does not include the link's own
        limit: a copy runs at the smaller of the two. ``None`` where it is not known.
        """
        path = self.dma_path(gpu, node_id)
        if path is None:
            return None
        to_gpu = direction == "h2d"
        return path.h2d_bandwidth_bytes_per_s if to_gpu else path.d2h_bandwidth_bytes_per_s

    def fact(self, name: str) -> float | None:
        """The published number of this name, in the unit of its suffix, if the machine has it."""
        return next((fact.value for fact in self.facts if fact.name == name), None)
