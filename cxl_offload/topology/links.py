"""How memory is reached: by CPUs (access), by GPUs (link, DMA path), and drives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """Latency and bandwidth of the CPUs of one node on the memory of another.

    Latencies are idle (unloaded), bandwidths saturated by the whole initiator. ``None`` means
    not known. Never use the bandwidths for GPU copies: see :meth:`Machine.dma_bandwidth`.
    """

    initiator: int
    target: int
    read_latency_ns: float | None = None
    write_latency_ns: float | None = None
    read_bandwidth_bytes_per_s: float | None = None
    write_bandwidth_bytes_per_s: float | None = None
    source: str = ""
    read_saturation_threads: int | None = None
    write_saturation_threads: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The link between a GPU and its host.

    ``h2d``/``d2h`` are what a large pinned copy reaches (or the signalling rate, when ``source``
    says so), ``peak`` the signalling rate of one direction, ``setup_s`` the fixed cost of a copy.
    """

    h2d_bandwidth_bytes_per_s: float | None = None
    d2h_bandwidth_bytes_per_s: float | None = None
    setup_s: float | None = None
    peak_bandwidth_bytes_per_s: float | None = None
    description: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator. ``name`` is unique in its machine; ``gpu0`` is the first in PCI order.

    ``node`` is the CPU node it is attached to, ``memory_node`` the node that its own memory forms
    (GH200, MI300A), ``memory_bytes`` is ``None`` where the driver does not show it in sysfs.
    ``peer_to_peer_cxl``: it reads CXL memory without crossing the CPU (CXL 3.1).
    """

    name: str
    node: int | None = None
    memory_bytes: int | None = None
    pci_address: str | None = None
    link: Link | None = None
    memory_node: int | None = None
    memory_bandwidth_bytes_per_s: float | None = None
    peak_flops_per_s: float | None = None
    local_cpus: tuple[int, ...] = ()
    peer_to_peer_cxl: bool = False
    model: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class DmaPath:
    """Copies between a GPU and one node: what the node delivers, apart from the link's limit.

    ``extra_latency_ns`` is added to each copy over the same copy from the GPU's local DRAM.
    """

    gpu: str
    node: int
    h2d_bandwidth_bytes_per_s: float | None = None
    d2h_bandwidth_bytes_per_s: float | None = None
    extra_latency_ns: float | None = None
    source: str = ""


@dataclass(frozen=True, slots=True)
class Drive:
    """Storage that backs the ``nvme`` tier; it is no NUMA node."""

    name: str
    capacity_bytes: int
    read_bandwidth_bytes_per_s: float | None = None
    write_bandwidth_bytes_per_s: float | None = None
    source: str = ""
