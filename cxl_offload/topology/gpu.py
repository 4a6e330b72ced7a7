"""GPUs and the nodes that are really their memory, from sysfs and the drivers' files alone.

No driver library is opened and no CUDA context is made. GPU memory shows up as a node on GH200
(nodes without CPUs) and on MI300A (the HBM that CPU and GPU share).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from cxl_offload.topology.links import Gpu, Link
from cxl_offload.topology.node import Node, NodeKind
from cxl_offload.topology.sysfs import NODES, read_list
from cxl_offload.topology.tree import PCI_DEVICES, Tree

_NVIDIA = 0x10DE
_VENDORS = {_NVIDIA: "NVIDIA", 0x1002: "AMD"}
# PCI classes: VGA, 3D controller, other display controller, processing accelerator
_CLASSES = {0x0300, 0x0302, 0x0380, 0x1200}
_APUS = {(0x1002, 0x74A0)}  # MI300A: its HBM is the memory of the node its own CPUs are on
_SPEED = re.compile(r"([0-9.]+) GT/s.*")


def read_gpus(tree: Tree, nodes: tuple[Node, ...]) -> tuple[Gpu, ...]:
    """GPUs in PCI order, named ``gpu0``, ``gpu1``, ..."""
    addresses = [
        address
        for address in tree.names(PCI_DEVICES, r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.\d")
        if (tree.integer(f"{PCI_DEVICES}/{address}/class", base=16) or 0) >> 8 in _CLASSES
        and tree.integer(f"{PCI_DEVICES}/{address}/vendor", base=16) in _VENDORS
    ]
    return tuple(
        _read_gpu(tree, f"gpu{index}", address, nodes)
        for index, address in enumerate(sorted(addresses))
    )


def _read_gpu(tree: Tree, name: str, address: str, nodes: tuple[Node, ...]) -> Gpu:
    folder = f"{PCI_DEVICES}/{address}"
    vendor = tree.integer(f"{folder}/vendor", base=16) or 0
    device = tree.integer(f"{folder}/device", base=16) or 0
    local_cpus = read_list(tree, f"{folder}/local_cpulist") or ()
    status = _driver_status(tree, address)
    near = tree.integer(f"{folder}/numa_node")
    return Gpu(
        name=name,
        model=_model(tree, address, vendor, device),
        node=_cpu_node(nodes, near, local_cpus),
        memory_node=_memory_node(nodes, near, status, (vendor, device)),
        memory_bytes=status.get("size") or _optional(tree, f"{folder}/mem_info_vram_total"),
        pci_address=address,
        link=_read_link(tree, folder),
        local_cpus=local_cpus,
        source="sysfs",
    )


def _optional(tree: Tree, path: str) -> int | None:
    return tree.integer(path) if tree.exists(path) else None


def _model(tree: Tree, address: str, vendor: int, device: int) -> str:
    information = tree.text(f"/proc/driver/nvidia/gpus/{address}/information") or ""
    match = re.search(r"(?m)^Model:\s+(\S.*)$", information)
    if match:
        return match.group(1).strip()
    product = tree.text(f"{PCI_DEVICES}/{address}/product_name")
    return product or f"{_VENDORS[vendor]} {vendor:04x}:{device:04x}"


def _driver_status(tree: Tree, address: str) -> dict[str, int]:
    """``node`` and ``size`` of GPU memory that the NVIDIA driver has put online as a node."""
    text = tree.text(f"/proc/driver/nvidia/gpus/{address}/numa_status") or ""
    values = dict(re.findall(r"(?m)^(\w+):\s+(\S+)", text))
    if values.get("Status", "").lower() != "online":
        return {}
    found = {}
    if re.fullmatch(r"\d+", values.get("Node", "")):
        found["node"] = int(values["Node"])
    if re.fullmatch(r"[0-9a-f]+", values.get("Size", "")):
        found["size"] = int(values["Size"], 16)
    return found


def _cpu_node(nodes: tuple[Node, ...], near: int | None, cpus: tuple[int, ...]) -> int | None:
    """The node with CPUs that a GPU hangs on; -1 in sysfs means that the firmware did not say."""
    with_cpus = [node for node in nodes if node.cpus]
    for node in with_cpus:
        if node.id == near:
            return node.id
    # local_cpulist names every CPU when the firmware is silent: then any node would be a guess
    local = [node.id for node in with_cpus if set(node.cpus) & set(cpus)]
    return local[0] if len(local) == 1 else None


def _memory_node(
    nodes: tuple[Node, ...], near: int | None, status: dict[str, int], device: tuple[int, int]
) -> int | None:
    ids = {node.id: node for node in nodes}
    if status.get("node") in ids:
        return status["node"]
    own = ids.get(near) if near is not None else None
    if own is None or not own.has_memory:
        return None
    return own.id if device in _APUS or not own.cpus else None


def _read_link(tree: Tree, folder: str) -> Link | None:
    """The link's signalling rate, an upper bound: idle GPUs slow down, so the maximum is read."""
    speed = _SPEED.fullmatch(tree.text(f"{folder}/max_link_speed") or "")
    text = tree.text(f"{folder}/max_link_width") or ""
    if speed is None or not text.isdigit() or not 0 < int(text) <= 32:
        return None  # 255 or nothing: no PCIe link, e.g. behind NVLink-C2C
    rate, width = float(speed.group(1)), int(text)
    # 8b/10b up to 5 GT/s, 128b/130b up to 32 GT/s, 242/256 in the flits of 64 GT/s
    payload = 0.8 if rate <= 5 else 128 / 130 if rate <= 32 else 242 / 256
    peak = rate * 1e9 * width * payload / 8
    return Link(
        h2d_bandwidth_bytes_per_s=peak,
        d2h_bandwidth_bytes_per_s=peak,
        peak_bandwidth_bytes_per_s=peak,
        description=f"PCIe {speed.group(1)} GT/s x{width}",
        source="signalling rate, an upper bound; measure for what copies reach",
    )


def mark_gpu_memory(tree: Tree, nodes: tuple[Node, ...], gpus: Iterable[Gpu]) -> tuple[Node, ...]:
    """Nodes whose memory belongs to a GPU get kind ``GPU`` and are used only when asked for."""
    owners = {gpu.memory_node: gpu for gpu in gpus if gpu.memory_node is not None}
    nvidia = [
        gpu
        for gpu in gpus
        if tree.integer(f"{PCI_DEVICES}/{gpu.pci_address}/vendor", base=16) == _NVIDIA
    ]
    # GH200 firmware declares the GPU as generic initiator of the nodes its memory comes up as
    generic = set(read_list(tree, f"{NODES}/has_generic_initiator") or ()) if nvidia else set()
    marked = []
    for node in nodes:
        owner = owners.get(node.id)
        if owner is None and node.id in generic and not node.cpus and node.has_memory:
            owner = nvidia[0] if len(nvidia) == 1 else None
            node = replace(node, kind=NodeKind.GPU)
        if owner is not None:
            node = replace(node, kind=NodeKind.GPU, gpu=owner.pci_address)
        if node.kind is NodeKind.GPU:
            whose = owner.model if owner else "a GPU"
            tree.note(f"node {node.id} is the memory of {whose}: used only when asked for")
        marked.append(node)
    if marked and not any(node.kind is not NodeKind.GPU for node in marked if node.has_memory):
        tree.note("this machine has GPU memory only: name its nodes, or the tier hbm, to use it")
    return tuple(marked)
