"""Hazards of the nodes: their zones, their room, and how far they are from the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from cxl_offload.topology.hazards.model import Hazard, Scene
from cxl_offload.topology.node import DaxDevice, Node
from cxl_offload.topology.sysfs import NODES
from cxl_offload.units import format_bytes

_LEAST_FREE_SHARE = 0.1
"""A fast node with less than this free is nearly full: the page cache or another job has it."""


def _dax_of(scene: Scene, node: Node) -> DaxDevice | None:
    devices = scene.machine.dax
    found = (dax for dax in devices if dax.target_node == node.id and dax.mode == "system-ram")
    return next(found, None)


def _online_kernel(scene: Scene, node: Node) -> str:
    """The command that puts a node's memory into ZONE_NORMAL."""
    dax = _dax_of(scene, node)
    if dax is not None:
        return (
            f"sudo daxctl offline-memory {dax.name} && "
            f"sudo daxctl online-memory --no-movable {dax.name}  # or use it as Device-DAX: "
            f"sudo daxctl reconfigure-device --force --mode=devdax {dax.name}"
        )
    return (
        f"for m in {NODES}/node{node.id}/memory*/state; do echo offline | sudo tee $m && "
        "echo online_kernel | sudo tee $m; done"
    )


def _movable_zone(scene: Scene) -> Iterator[Hazard]:
    for node in scene.cxl_nodes:
        if not node.movable_bytes:
            continue
        yield Hazard(
            "movable-zone",
            "error" if scene.machine.gpus else "warning",
            f"node {node.id}: {format_bytes(node.movable_bytes)} of "
            f"{format_bytes(node.capacity_bytes)} of CXL memory is in ZONE_MOVABLE",
            "a long-term pin (GPU copies, RDMA, io_uring fixed buffers) first moves the pages to "
            "another node, without an error: pinned tensors of this tier end up in DRAM. pin=True "
            "raises PlacementError here, or says so with strict=False",
            _online_kernel(scene, node),
            "/proc/zoneinfo; Documentation/admin-guide/mm/memory-hotplug.rst, ZONE_MOVABLE",
        )


def _offline_memory(scene: Scene) -> Iterator[Hazard]:
    for node in scene.machine.nodes:
        idle = sum(group.total_bytes for group in node.blocks if group.state == "offline")
        if not idle:
            continue
        dax = _dax_of(scene, node)
        yield Hazard(
            "offline-memory",
            "warning",
            f"node {node.id}: {format_bytes(idle)} of its memory is offline",
            "nobody can use it",
            f"sudo daxctl online-memory --no-movable {dax.name}"
            if dax
            else f"for m in {NODES}/node{node.id}/memory*/state; do "
            "echo online_kernel | sudo tee $m; done",
            "/sys/devices/system/memory; Documentation/admin-guide/mm/memory-hotplug.rst",
        )


def _unbound_dax(scene: Scene) -> Iterator[Hazard]:
    for dax in scene.machine.dax:
        if dax.mode == "unbound":
            yield Hazard(
                "unbound-dax",
                "warning",
                f"{dax.name} ({format_bytes(dax.size_bytes)}) has no driver",
                "its memory is neither a node nor a device to map: nobody can use it",
                f"sudo daxctl reconfigure-device --mode=system-ram --no-movable {dax.name}  "
                f"# a node; or --mode=devdax for the policy dax:{dax.name}",
                "/sys/bus/dax/devices; daxctl-reconfigure-device(1)",
            )


def _far_gpu(scene: Scene) -> Iterator[Hazard]:
    for gpu in scene.machine.gpus:
        if gpu.node is None:
            continue
        for node in scene.cxl_nodes:
            near = scene.nearest_cpus(node)
            if near is None or near == gpu.node or _same_socket(scene, near, gpu.node):
                continue
            yield Hazard(
                "far-gpu",
                "warning",
                f"{gpu.name} hangs on node {gpu.node}, CXL node {node.id} on node {near}",
                "copies between them cross the sockets' link, on top of CXL's own latency, and "
                "share that link with the CPUs",
                f"run on a GPU of node {near}, move a card, or stage through DRAM: "
                f"numactl --cpunodebind={gpu.node} --preferred={gpu.node} ...",
                f"numa_node of {gpu.pci_address or gpu.name}; {NODES}/node*/distance",
            )


def _same_socket(scene: Scene, first: int, second: int) -> bool:
    sockets = scene.machine.node(first).socket, scene.machine.node(second).socket
    return sockets[0] is not None and sockets[0] == sockets[1]


def _full_fast_node(scene: Scene) -> Iterator[Hazard]:
    fast = [tier for tier in scene.machine.tiers if tier.name == "ldram"]
    for node_id in (node for tier in fast for node in tier.nodes):
        node = scene.machine.node(node_id)
        if node.free_bytes is None or node.free_bytes >= _LEAST_FREE_SHARE * node.capacity_bytes:
            continue
        cached = node.page_cache_bytes
        mostly_cache = cached >= _LEAST_FREE_SHARE * node.capacity_bytes
        yield Hazard(
            "fast-node-full",
            "note" if mostly_cache else "warning",
            f"node {node.id} (tier ldram) has {format_bytes(node.free_bytes)} of "
            f"{format_bytes(node.capacity_bytes)} free"
            + (f", and {format_bytes(cached)} of page cache" if cached else ""),
            "what is used most no longer fits the fast tier: preferred policies spill to slower "
            "nodes, bind is refused; where it is page cache, other allocators are passed to slower "
            "nodes although the cache could be dropped",
            "sync; echo 1 | sudo tee /proc/sys/vm/drop_caches"
            if mostly_cache
            else f"numastat -m; end or move what fills node {node.id}",
            f"{NODES}/node{node.id}/meminfo",
        )


NODE_CHECKS = (_movable_zone, _offline_memory, _unbound_dax, _far_gpu, _full_fast_node)
