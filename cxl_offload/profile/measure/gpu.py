"""Copies between the GPUs of the CUDA driver and the memory of nodes; no torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cxl_offload import _C
from cxl_offload.profile.copies import CopyCall, CopyDirection, measure_copies
from cxl_offload.profile.measure import nvml, probe
from cxl_offload.profile.measure.effort import Effort
from cxl_offload.profile.measure.findings import Findings
from cxl_offload.profile.measure.probe import Allocator, Buffer
from cxl_offload.profile.model import CopyProfile, GpuFacts
from cxl_offload.profile.schedule import Schedule
from cxl_offload.topology import Machine, Node
from cxl_offload.units import MIB, format_bytes

_PAIR_STEPS = 4.0
"""A pair of GPU and node is four numbers."""


@dataclass(frozen=True, slots=True)
class GpuName:
    """A GPU as its driver lists it; ``pci_address`` such as ``0000:3b:00.0``.

    ``memory_bytes`` is None where the driver does not say.
    """

    name: str
    pci_address: str
    memory_bytes: int | None = None


class Gpus(Protocol):
    """The GPUs of this machine."""

    def list(self) -> tuple[tuple[GpuName, ...], str]:
        """All of them in the driver's order and, when there are none, the reason."""
        ...

    def open(self, ordinal: int, buffer: Buffer) -> CopyCall:
        """Pins the buffer and makes copies between it and that GPU, until the call is dropped.

        Raises
        ------
        ValueError, MemoryError, OSError
            The driver refuses.
        """
        ...


class CudaGpus:
    """Those of the CUDA driver, which is opened when the GPUs are listed.

    Opening a GPU takes its primary context, and makes it where the process has none.
    """

    def __init__(self, library: str = "libcuda.so.1", *, nvml: str = nvml.LIBRARY) -> None:
        self._library = library
        self._nvml = nvml

    def list(self) -> tuple[tuple[GpuName, ...], str]:
        """As :meth:`Gpus.list`."""
        found, reason = _C.list_gpus(self._library)
        sizes = nvml.memory_bytes([address for _, address in found], library=self._nvml)
        named = (GpuName(name, address, sizes.get(address)) for name, address in found)
        return tuple(named), reason

    def open(self, ordinal: int, buffer: Buffer) -> CopyCall:
        """As :meth:`Gpus.open`."""
        copies = _C.GpuCopies(self._library, ordinal, buffer.address, buffer.nbytes)

        def copy(direction: CopyDirection, nbytes: int) -> None:
            copies.copy(direction == "h2d", nbytes)

        return copy


class CopyProbe:
    """Copies between every GPU and every node."""

    def __init__(
        self,
        allocator: Allocator,
        gpus: Gpus,
        nodes: Sequence[Node],
        *,
        cpus: Sequence[int],
        effort: Effort,
    ) -> None:
        self._allocator = allocator
        self._gpus = gpus
        self._nodes = nodes
        self._cpus = cpus
        self._effort = effort
        self._found: list[CopyProfile] = []
        self._notes: list[str] = []
        self._names, reason = gpus.list()
        if not self._names and allocator.machine.gpus:
            self._notes.append(f"copies to the GPU were not measured: {reason}")

    @property
    def pairs(self) -> int:
        """How many pairs of GPU and node there are."""
        return len(self._names) * len(self._nodes)

    @property
    def longest_s(self) -> float:
        """What one step takes at most."""
        return _PAIR_STEPS * self._effort.longest_s

    def plan(self, schedule: Schedule) -> None:
        """Adds a step for every pair."""
        for ordinal, name in enumerate(self._names):
            for node in self._nodes:
                schedule.add(
                    f"copies between {name.name} and node {node.id}",
                    lambda seconds, ordinal=ordinal, node=node: self._measure(  # type: ignore[misc]
                        ordinal, node, seconds
                    ),
                    setup=1.0,
                )

    def collect(self, skipped: Sequence[str], into: Findings) -> None:
        """Adds what was found."""
        into.copies += self._found
        into.gpus += [
            GpuFacts(
                name=gpu_name(self._allocator.machine, listed, ordinal),
                model=listed.name,
                pci_address=listed.pci_address,
                memory_bytes=listed.memory_bytes,
            )
            for ordinal, listed in enumerate(self._names)
        ]
        into.notes += self._notes
        into.not_measured(skipped)

    def close(self) -> None:
        """Holds no buffer between steps."""

    def _measure(self, ordinal: int, node: Node, seconds: float) -> None:
        self._allocator.trim()
        gpu = gpu_name(self._allocator.machine, self._names[ordinal], ordinal)
        where = f"copies between {gpu} and node {node.id} were not measured"
        free = node.capacity_bytes if node.free_bytes is None else node.free_bytes
        nbytes = min(self._effort.copy_bytes, free // 8) // MIB * MIB
        if nbytes == 0:
            self._notes.append(f"{where}: {format_bytes(free)} are free there")
            return
        buffer = probe.prepare(self._allocator, nbytes, {node.id: 1}, pages="base", cpus=self._cpus)
        try:
            copy = self._gpus.open(ordinal, buffer)
        except (ValueError, MemoryError, OSError) as error:
            self._notes.append(f"{where}: {error}")
            return
        # Pinning moves pages out of memory that can be unplugged, which much CXL memory is.
        granted = self._allocator.bytes_per_node(buffer.address, buffer.nbytes)
        if granted.get(node.id) != buffer.nbytes:
            there = ", ".join(str(other) for other, count in granted.items() if count)
            self._notes.append(f"{where}: its pages move to node {there} when they are pinned")
            return
        self._found.append(
            measure_copies(
                copy, gpu=gpu, node=node.id, pinned=True, copy_bytes=nbytes, seconds=seconds
            )
        )


def gpu_name(machine: Machine, listed: GpuName, ordinal: int) -> str:
    """The machine's own name of a GPU of the driver, or the driver's if the machine lacks it."""
    for gpu in machine.gpus:
        if gpu.pci_address is not None and gpu.pci_address.lower() == listed.pci_address:
            return gpu.name
    return f"cuda{ordinal} ({listed.name})"
