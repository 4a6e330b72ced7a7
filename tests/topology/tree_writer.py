"""Writes small sysfs and procfs trees in the layout of the kernel's ABI documents.

Used by tests/fixtures/sysfs/make_trees.py for the small machines, and by tests that need
a variation of one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cxl_offload.topology.cpulist import format_cpulist

GIB = 1 << 30
BLOCK_BYTES = 2 * GIB  # what x86 kernels choose on machines with 64 GiB and more
NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class CxlDevice:
    """A CXL memory device below its own root port, with one endpoint."""

    name: str
    endpoint: str
    address: str
    node: int
    size_bytes: int


class TreeWriter:
    """A folder that gets files and relative links."""

    def __init__(self, root: Path, *, hostname: str, page_bytes: int = 4096) -> None:
        self.root = root
        self.page_bytes = page_bytes
        self._zoneinfo: list[str] = []
        self._next_block = 0
        self.file("proc/sys/kernel/hostname", hostname)

    def file(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n", encoding="utf-8")

    def link(self, path: str, to: str) -> None:
        """A link at ``path`` to ``to``, both from the root of the tree, stored relative."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(os.path.relpath(self.root / to, target.parent))

    def node_lists(self, *, online: str, possible: str, has_cpu: str, has_memory: str) -> None:
        lists = {"online": online, "possible": possible}
        for name, text in {**lists, "has_cpu": has_cpu, "has_memory": has_memory}.items():
            self.file(f"{NODES}/{name}", text)

    def node(
        self,
        node: int,
        *,
        cpus: str,
        total_bytes: int,
        free_bytes: int,
        distance: Sequence[int],
        zone: str = "Normal",
    ) -> None:
        folder = f"{NODES}/node{node}"
        total, free = total_bytes >> 10, free_bytes >> 10
        self.file(f"{folder}/cpulist", cpus)
        self.file(f"{folder}/distance", " ".join(map(str, distance)))
        self.file(
            f"{folder}/meminfo",
            f"Node {node} MemTotal:       {total} kB\nNode {node} MemFree:        {free} kB\n"
            f"Node {node} MemUsed:        {total - free} kB",
        )
        if total_bytes:
            self.zone(node, zone, total_bytes, free_bytes)

    def zone(self, node: int, name: str, managed_bytes: int, free_bytes: int) -> None:
        managed, free = managed_bytes // self.page_bytes, free_bytes // self.page_bytes
        self._zoneinfo.append(
            f"Node {node}, zone {name:>8}\n  pages free     {free}\n        boost    0\n"
            f"        min      64\n        spanned  {managed}\n        present  {managed}\n"
            f"        managed  {managed}\n      nr_free_pages {free}"
        )

    def blocks(self, node: int, count: int, *, state: str, valid_zones: str) -> None:
        self.file("sys/devices/system/memory/block_size_bytes", f"{BLOCK_BYTES:x}")
        for _ in range(count):
            name = f"memory{self._next_block}"
            self._next_block += 1
            self.file(f"sys/devices/system/memory/{name}/state", state)
            self.file(f"sys/devices/system/memory/{name}/valid_zones", valid_zones)
            self.link(f"{NODES}/node{node}/{name}", f"sys/devices/system/memory/{name}")

    def huge_pages(self, node: int, page_kib: int, *, total: int, free: int) -> None:
        folder = f"{NODES}/node{node}/hugepages/hugepages-{page_kib}kB"
        self.file(f"{folder}/nr_hugepages", total)
        self.file(f"{folder}/free_hugepages", free)
        self.file(f"{folder}/surplus_hugepages", 0)

    def hmat(
        self,
        target: int,
        *,
        initiators: Sequence[int],
        latency_ns: tuple[int, int],
        bandwidth_mb_per_s: tuple[int, int],
        classes: Sequence[str] = ("access0", "access1"),
    ) -> None:
        """Latency and bandwidth (read, write) of the best initiators of a target.

        The kernel links to the initiators' folders; here they are empty files, because a link from
        a node to itself sends every tool that follows links round in circles.
        """
        for name in classes:
            folder = f"{NODES}/node{target}/{name}/initiators"
            self.file(f"{folder}/read_latency", latency_ns[0])
            self.file(f"{folder}/write_latency", latency_ns[1])
            self.file(f"{folder}/read_bandwidth", bandwidth_mb_per_s[0])
            self.file(f"{folder}/write_bandwidth", bandwidth_mb_per_s[1])
            for initiator in initiators:
                self.file(f"{folder}/node{initiator}", "")

    def cpu(self, cpu: int, *, package: int, llc_kib: int = 0, shared: str = "") -> None:
        folder = f"sys/devices/system/cpu/cpu{cpu}"
        self.file(f"{folder}/topology/physical_package_id", package)
        if llc_kib:
            self.file(f"{folder}/cache/index3/level", 3)
            self.file(f"{folder}/cache/index3/size", f"{llc_kib}K")
            self.file(f"{folder}/cache/index3/shared_cpu_list", shared)

    def process(
        self,
        *,
        cpus: str,
        mems: str,
        cgroup: str = "0::/user.slice",
        mounts: str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate",
        memlock: str = "8388608",
    ) -> None:
        """What the process that captured the tree saw of itself; call it last."""
        self.file(
            "proc/self/status",
            f"Name:\tcxl-offload\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}",
        )
        self.file(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n"
            f"Max locked memory         {memlock:<20} {memlock:<20} bytes     ",
        )
        self.file("proc/self/cgroup", cgroup)
        self.file("proc/self/mountinfo", mounts)
        if self._zoneinfo:
            self.file("proc/zoneinfo", "\n".join(self._zoneinfo))

    def cgroup2(self, path: str, *, maximum: object, high: object, current: int) -> None:
        folder = f"sys/fs/cgroup/{path}".rstrip("/")
        for name, value in {"max": maximum, "high": high, "current": current}.items():
            self.file(f"{folder}/memory.{name}", value)

    def gpu(
        self,
        address: str,
        *,
        vendor: int,
        device: int,
        node: int,
        cpus: Sequence[int],
        pci_class: int = 0x030200,
        link: tuple[str, str] | None = None,
    ) -> None:
        real = f"sys/devices/pci{address[:7]}/{address}"
        self.file(f"{real}/class", f"0x{pci_class:06x}")
        self.file(f"{real}/vendor", f"0x{vendor:04x}")
        self.file(f"{real}/device", f"0x{device:04x}")
        self.file(f"{real}/numa_node", node)
        self.file(f"{real}/local_cpulist", format_cpulist(cpus))
        if link:
            self.file(f"{real}/max_link_speed", link[0])
            self.file(f"{real}/max_link_width", link[1])
        self.link(f"sys/bus/pci/devices/{address}", real)

    def cxl_device(self, device: CxlDevice) -> None:
        root = "sys/devices/platform/ACPI0017:00/root0"
        real = f"sys/devices/pci{device.address[:7]}/{device.address[:8]}00.0/{device.address}"
        self.file(f"{real}/{device.name}/ram/size", f"0x{device.size_bytes:x}")
        self.file(f"{real}/{device.name}/numa_node", device.node)
        self.link(f"sys/bus/cxl/devices/{device.name}", f"{real}/{device.name}")
        endpoint = f"{root}/port1/{device.endpoint}"
        self.link(f"{endpoint}/uport", f"{real}/{device.name}")
        self.link(f"sys/bus/cxl/devices/{device.endpoint}", endpoint)

    def endpoint_decoder(self, device: CxlDevice, decoder: str) -> None:
        real = f"sys/devices/platform/ACPI0017:00/root0/port1/{device.endpoint}/{decoder}"
        self.file(f"{real}/mode", "ram")
        self.link(f"sys/bus/cxl/devices/{decoder}", real)

    def cxl_region(
        self, region: str, *, decoders: Sequence[str], granularity: int, size_bytes: int
    ) -> str:
        """A region; returns its folder."""
        real = f"sys/devices/platform/ACPI0017:00/root0/decoder0.0/{region}"
        self.file(f"{real}/size", f"0x{size_bytes:x}")
        self.file(f"{real}/mode", "ram")
        self.file(f"{real}/interleave_ways", len(decoders))
        self.file(f"{real}/interleave_granularity", granularity)
        for index, decoder in enumerate(decoders):
            self.file(f"{real}/target{index}", decoder)
        self.link(f"sys/bus/cxl/devices/{region}", real)
        return real

    def dax(
        self, name: str, *, parent: str, driver: str | None, size_bytes: int, target_node: int
    ) -> None:
        real = f"{parent}/{name}"
        self.file(f"{real}/size", size_bytes)
        self.file(f"{real}/align", 2 << 20)
        self.file(f"{real}/target_node", target_node)
        if driver:
            self.file(f"sys/bus/dax/drivers/{driver}/new_id", "")
            self.link(f"{real}/driver", f"sys/bus/dax/drivers/{driver}")
        self.link(f"sys/bus/dax/devices/{name}", real)
