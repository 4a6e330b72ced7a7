"""What was measured on a machine, as frozen data; nothing is measured or read here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from cxl_offload.profile.curves import (
    KINDS,
    SATURATED,
    BandwidthCurve,
    BandwidthPoint,
    Estimate,
    InterleavePoint,
    InterleaveSweep,
    Latency,
    LoadedCurve,
    LoadedPoint,
    LoopKind,
    MixPoint,
    estimate,
    saturation_threads,
)
from cxl_offload.profile.operators.model import CachePoint, LayerPoint, LinearPoint, OperatorProfile
from cxl_offload.renamed import old_names
from cxl_offload.topology import Access, DmaPath, Gpu, Machine
from cxl_offload.topology.node import Pages
from cxl_offload.units import format_bytes

__all__ = [
    "KINDS",
    "PROFILE_VERSION",
    "SATURATED",
    "BandwidthCurve",
    "BandwidthPoint",
    "CachePoint",
    "CopyProfile",
    "Estimate",
    "Fingerprint",
    "GpuFacts",
    "InterleavePoint",
    "InterleaveSweep",
    "Latency",
    "LayerPoint",
    "LinearPoint",
    "LoadedCurve",
    "LoadedPoint",
    "LoopKind",
    "MeasureMode",
    "MixPoint",
    "NodeFacts",
    "NodeRates",
    "OperatorProfile",
    "Pages",
    "PathProfile",
    "Profile",
    "estimate",
    "saturation_threads",
]

PROFILE_VERSION = 1

MeasureMode = Literal["rates", "quick", "full"]
"""How much was measured: only what :class:`NodeRates` hold, few points of everything, or all."""


@dataclass(frozen=True, slots=True)
class PathProfile:
    """Everything measured from the CPUs of ``initiator`` to the memory of ``node``.

    ``cpus`` are in the order in which threads were put on them, one of every core first.
    ``notes`` say what was left out or limited, and why.
    """

    initiator: int
    node: int
    cpus: tuple[int, ...]
    working_set_bytes: int
    latencies: tuple[Latency, ...] = ()
    curves: tuple[BandwidthCurve, ...] = ()
    loaded: tuple[LoadedCurve, ...] = ()
    mixes: tuple[MixPoint, ...] = ()
    notes: tuple[str, ...] = ()

    def latency_ns(self, pages: Pages = "base") -> float | None:
        """Median idle latency with such pages, if it was measured."""
        found = (entry for entry in self.latencies if entry.pages == pages)
        entry = next(found, None)
        return None if entry is None else entry.latency_ns.median

    def curve(self, kind: LoopKind, pages: Pages = "base") -> BandwidthCurve | None:
        """The curve of this kind of access and pages, if it was measured."""
        found = (curve for curve in self.curves if (curve.kind, curve.pages) == (kind, pages))
        return next(found, None)

    def peak_bytes_per_s(self, kind: LoopKind, pages: Pages = "base") -> float | None:
        """The best bandwidth of this kind of access and pages, if it was measured."""
        curve = self.curve(kind, pages)
        return None if curve is None else curve.peak_bytes_per_s


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What one node gives the CPUs of one other: the short form of a path.

    Attributes
    ----------
    node
        Whose memory.
    load_bytes_per_s, store_bytes_per_s
        Peaks of plain loads and stores on base pages; ``None`` where there was no time for them.
    latency_ns
        Idle, of dependent loads in random order on base pages.
    """

    node: int
    load_bytes_per_s: float | None
    store_bytes_per_s: float | None
    latency_ns: float | None


@dataclass(frozen=True, slots=True)
class CopyProfile:
    """Copies between a GPU and a node: large ones for bandwidth, 64-byte ones for latency."""

    gpu: str
    node: int
    pinned: bool
    copy_bytes: int
    h2d_bandwidth_bytes_per_s: Estimate
    d2h_bandwidth_bytes_per_s: Estimate
    h2d_latency_ns: Estimate
    d2h_latency_ns: Estimate


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as its driver lists it; ``name`` is the machine's own for it.

    ``memory_bytes`` is None where the driver did not say.
    """

    name: str
    model: str
    pci_address: str
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as it was when the profile was made."""

    id: int
    kind: str
    cpus: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the numbers depend on.

    ``transparent_huge_pages`` is the kernel's mode (``always``, ``madvise``, ``never``) or
    ``unknown``; ``isa`` the instruction set of the probe's loops; ``gpus`` name their models.
    """

    cpu_model: str
    cpus: int
    nodes: tuple[NodeFacts, ...]
    kernel: str
    page_bytes: int
    transparent_huge_pages: str
    isa: str
    gpus: tuple[str, ...] = ()

    def mismatches(self, other: Fingerprint) -> tuple[str, ...]:
        """Lines on what makes ``other`` another machine, whose numbers are of no use here.

        Processors, nodes, page size and GPUs count; another kernel or kernel setting does not,
        and a node's capacity only by more than 2 %: kernels keep different amounts to themselves.
        """
        nodes = other.nodes if _alike(self.nodes, other.nodes) else self.nodes
        own = (
            ("cpu_model", self.cpu_model),
            ("cpus", self.cpus),
            ("nodes", nodes),
            ("page_bytes", self.page_bytes),
            ("gpus", self.gpus),
        )
        return _compared(own, other)


def _compared(own: Iterable[tuple[str, object]], other: Fingerprint) -> tuple[str, ...]:
    return tuple(
        f"{name}: {_shown(value)} against {_shown(getattr(other, name))}"
        for name, value in own
        if value != getattr(other, name)
    )


def _shown(value: object) -> str:
    """One line for a person."""
    if not isinstance(value, tuple):
        return str(value)
    parts = (
        f"{part.id} ({part.kind}, {part.cpus} CPUs, {format_bytes(part.capacity_bytes)})"
        if isinstance(part, NodeFacts)
        else str(part)
        for part in value
    )
    return ", ".join(parts) or "none"


def _alike(first: tuple[NodeFacts, ...], second: tuple[NodeFacts, ...]) -> bool:
    return len(first) == len(second) and all(
        (one.id, one.kind, one.cpus) == (two.id, two.kind, two.cpus)
        and abs(one.capacity_bytes - two.capacity_bytes) <= 0.02 * one.capacity_bytes
        for one, two in zip(first, second, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Latency and bandwidth of a machine's memory.

    Attributes
    ----------
    date
        UTC, ISO 8601.
    measured
        True for numbers of the real machine, False for those of a simulated one.
    seconds
        How long the measuring took.
    operators
        Those of torch, on every device that was asked for.
    gpus
        What the driver says of every GPU, where copies were measured.
    """

    version: int = PROFILE_VERSION
    machine: Fingerprint
    date: str
    measured: bool
    mode: MeasureMode
    seconds: float
    paths: tuple[PathProfile, ...]
    sweeps: tuple[InterleaveSweep, ...] = ()
    copies: tuple[CopyProfile, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    gpus: tuple[GpuFacts, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def path(self, initiator: int, node: int) -> PathProfile:
        """The measurements from one node's CPUs to one node's memory.

        Raises
        ------
        ValueError
            If that path was not measured.
        """
        for path in self.paths:
            if (path.initiator, path.node) == (initiator, node):
                return path
        known = ", ".join(f"{path.initiator}->{path.node}" for path in self.paths) or "none"
        raise ValueError(f"path {initiator}->{node} was not measured; measured are {known}")

    def rates(self, initiator: int | None = None) -> tuple[NodeRates, ...]:
        """The short form of every path from one node's CPUs.

        Parameters
        ----------
        initiator
            By default that of the first path.
        """
        if initiator is None and self.paths:
            initiator = self.paths[0].initiator
        return tuple(
            NodeRates(
                node=path.node,
                load_bytes_per_s=path.peak_bytes_per_s("load"),
                store_bytes_per_s=path.peak_bytes_per_s("store"),
                latency_ns=path.latency_ns(),
            )
            for path in self.paths
            if path.initiator == initiator
        )

    def accesses(self) -> tuple[Access, ...]:
        """The measured paths in the terms of a machine.

        Latency is that of transparent huge pages where it was measured (the memory's own, as
        machine files have it), of base pages otherwise; bandwidths are peaks of plain loads and
        stores on base pages.
        """
        return tuple(_access(path, self._source) for path in self.paths)

    def dma_paths(self, machine: Machine) -> tuple[DmaPath, ...]:
        """The measured copies of the machine's own GPUs.

        A copy is as slow as the slower of link and node, so what was measured is a lower bound of
        what the node delivers; ``min(link, node)`` is right. ``extra_latency_ns`` is what a copy
        of 64 bytes to the GPU takes longer than from the nearest node.
        """
        known = {gpu.name for gpu in machine.gpus}
        nearest: dict[str, float] = {}
        for copy in self.copies:
            latency_ns = copy.h2d_latency_ns.median
            nearest[copy.gpu] = min(nearest.get(copy.gpu, latency_ns), latency_ns)
        return tuple(
            DmaPath(
                gpu=copy.gpu,
                node=copy.node,
                h2d_bandwidth_bytes_per_s=copy.h2d_bandwidth_bytes_per_s.median,
                d2h_bandwidth_bytes_per_s=copy.d2h_bandwidth_bytes_per_s.median,
                extra_latency_ns=copy.h2d_latency_ns.median - nearest[copy.gpu],
                source=self._source,
            )
            for copy in self.copies
            if copy.gpu in known
        )

    def applied_to(self, machine: Machine) -> Machine:
        """``machine`` with what was measured in place of its own numbers for the same paths.

        Its GPUs have the names of models and the memory that their driver says.
        Where one number of a path was not measured (there was no time for it), the machine's own
        stays, and the source says that too.

        Raises
        ------
        ValueError
            If the profile names nodes that the machine does not have.
        """
        own = tuple(
            _completed(access, machine.access(access.initiator, access.target))
            for access in self.accesses()
        )
        accesses = {(access.initiator, access.target): access for access in machine.accesses}
        accesses |= {(access.initiator, access.target): access for access in own}
        paths = {(path.gpu, path.node): path for path in machine.dma_paths}
        paths |= {(path.gpu, path.node): path for path in self.dma_paths(machine)}
        listed = {gpu.name: gpu for gpu in self.gpus}
        return replace(
            machine,
            accesses=tuple(accesses.values()),
            dma_paths=tuple(paths.values()),
            gpus=tuple(_as_listed(gpu, listed.get(gpu.name)) for gpu in machine.gpus),
        )

    @property
    def _source(self) -> str:
        how = "measured" if self.measured else "simulated"
        return f"{how} on {self.machine.cpu_model}, {self.date}"


def _as_listed(gpu: Gpu, listed: GpuFacts | None) -> Gpu:
    """A GPU with what its driver says of it."""
    if listed is None:
        return gpu
    return replace(gpu, model=listed.model, memory_bytes=listed.memory_bytes or gpu.memory_bytes)


def _completed(found: Access, known: Access | None) -> Access:
    """``found`` with the numbers that it lacks from ``known``."""
    if known is None:
        return found
    lacking = {
        entry.name: getattr(known, entry.name)
        for entry in fields(found)
        if getattr(found, entry.name) is None and getattr(known, entry.name) is not None
    }
    if not lacking:
        return found
    source = f"{found.source}; not measured: {', '.join(lacking)} ({known.source or 'no source'})"
    return replace(found, source=source, **lacking)


def _access(path: PathProfile, source: str) -> Access:
    load, store = path.curve("load"), path.curve("store")
    return Access(
        initiator=path.initiator,
        target=path.node,
        read_latency_ns=path.latency_ns("thp") or path.latency_ns("base"),
        read_bandwidth_bytes_per_s=None if load is None else load.peak_bytes_per_s,
        write_bandwidth_bytes_per_s=None if store is None else store.peak_bytes_per_s,
        read_saturation_threads=None if load is None else load.saturation_threads,
        write_saturation_threads=None if store is None else store.saturation_threads,
        source=source,
    )


__getattr__ = old_names(__name__)
