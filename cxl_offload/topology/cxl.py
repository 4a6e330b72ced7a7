"""Which nodes are CXL memory, and how we know: dax -> region -> endpoint -> memdev -> PCI.

A node is CXL for certain when a DAX device of a CXL region targets it. Memory that the firmware
mapped itself leaves no such chain; then a node without CPUs is judged by the firmware's HMAT, or
by its distance alone, and the evidence says which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from cxl_offload.topology.links import Access
from cxl_offload.topology.node import CxlEvidence, DaxDevice, Node, NodeKind
from cxl_offload.topology.tree import Tree

_DAX = "/sys/bus/dax/devices"
_CXL = "/sys/bus/cxl/devices"
_MODES: dict[str | None, Literal["devdax", "system-ram", "unbound"]] = {
    "kmem": "system-ram",
    "device_dax": "devdax",
}
# Xeon Max shows its on-package HBM at distance 13 from its own CPUs, closer than any CXL device.
_MIN_CXL_DISTANCE = 14


def read_dax(tree: Tree) -> tuple[DaxDevice, ...]:
    """Every Device-DAX instance, with the CXL chain behind it where there is one."""
    return tuple(_read_dax(tree, name) for name in tree.names(_DAX, r"dax\d+\.\d+"))


def _read_dax(tree: Tree, name: str) -> DaxDevice:
    folder = f"{_DAX}/{name}"
    target = tree.integer(f"{folder}/target_node")
    return DaxDevice(
        name=name,
        mode=_MODES.get(tree.link_name(f"{folder}/driver"), "unbound"),
        size_bytes=tree.integer(f"{folder}/size") or 0,
        target_node=None if target is None or target < 0 else target,
        align_bytes=tree.integer(f"{folder}/align"),
        cxl=_read_chain(tree, name),
    )


def _read_chain(tree: Tree, dax: str) -> CxlEvidence | None:
    """Evidence of the CXL region a DAX device lies in; ``None`` for other memory."""
    real = tree.real(f"{_DAX}/{dax}") or ""
    regions = [part for part in real.split("/") if re.fullmatch(r"region\d+", part)]
    if not regions or not tree.exists(f"{_CXL}/{regions[-1]}"):
        return None  # persistent memory has regions too, on the nvdimm bus
    region = regions[-1]
    folder = f"{_CXL}/{region}"
    ways = tree.integer(f"{folder}/interleave_ways")
    decoders, memdevs, addresses = [], [], []
    for index in range(ways or 1):
        decoder = tree.text(f"{folder}/target{index}")
        if not decoder:
            continue
        decoders.append(decoder)
        memdev, address = _endpoint(tree, decoder)
        memdevs += [memdev] if memdev else []
        addresses += [address] if address else []
    detail = f"{dax} lies in {region}"
    if memdevs:
        detail += f" of {', '.join(memdevs)} at PCI {', '.join(addresses) or 'unknown'}"
    return CxlEvidence(
        kind="cxl-region",
        detail=detail,
        region=region,
        endpoint_decoders=tuple(decoders),
        memdevs=tuple(memdevs),
        pci_addresses=tuple(addresses),
        dax=dax,
        interleave_ways=ways,
        interleave_granularity_bytes=tree.integer(f"{folder}/interleave_granularity"),
    )


def _endpoint(tree: Tree, decoder: str) -> tuple[str | None, str | None]:
    """Memory device and PCI address behind an endpoint decoder."""
    path = tree.real(f"{_CXL}/{decoder}")
    if path is None:
        return None, None
    endpoint = path.rsplit("/", 2)[1]
    memdev = tree.real(f"{_CXL}/{endpoint}/uport")
    if memdev is None:
        return None, None
    address, name = memdev.rsplit("/", 2)[1:]
    return name, address if re.fullmatch(
        r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}\.\d", address
    ) else None


def _socket(tree: Tree, nodes: tuple[Node, ...], evidence: CxlEvidence | None) -> int | None:
    """The socket that all cards behind a node hang on, if it is one."""
    memdevs = evidence.memdevs if evidence else ()
    near = {tree.integer(f"{_CXL}/{memdev}/numa_node") for memdev in memdevs}
    sockets = {node.socket for node in nodes if node.id in near}
    return sockets.pop() if len(near) == len(sockets) == 1 else None


def classify_nodes(
    tree: Tree,
    nodes: tuple[Node, ...],
    *,
    dax: tuple[DaxDevice, ...],
    distances: dict[int, dict[int, int]],
    accesses: tuple[Access, ...],
) -> tuple[Node, ...]:
    """Decide what the nodes without CPUs are; GPU memory must already be marked."""
    memdevs = tree.names(_CXL, r"mem\d+")
    classified = []
    for node in nodes:
        if node.kind is NodeKind.UNKNOWN and node.online and not node.cpus:
            owner = next(
                (device for device in dax if device.target_node == node.id and device.cxl), None
            )
            plain = next((device for device in dax if device.target_node == node.id), None)
            if owner is not None:
                socket = _socket(tree, nodes, owner.cxl)
                node = replace(node, kind=NodeKind.CXL, evidence=owner.cxl, socket=socket)
            elif plain is not None and "/ndbus" in (tree.real(f"{_DAX}/{plain.name}") or ""):
                tree.note(f"node {node.id} is persistent memory ({plain.name}); it is in no tier")
            elif node.has_memory:
                node = _judge(tree, node, nodes, distances, accesses, memdevs)
        classified.append(node)
    return tuple(classified)


def _judge(
    tree: Tree,
    node: Node,
    nodes: tuple[Node, ...],
    distances: dict[int, dict[int, int]],
    accesses: tuple[Access, ...],
    memdevs: Sequence[str],
) -> Node:
    """A node without CPUs and without a CXL chain: HMAT first, then distance."""
    hint = f"; CXL memory devices present: {', '.join(memdevs)}" if memdevs else ""
    dram = {other.id for other in nodes if other.kind is NodeKind.DRAM}
    verdict = _judge_by_hmat(node, dram, accesses)
    if verdict is not None:
        kind, reason = verdict
        if kind is not NodeKind.CXL:
            return replace(node, kind=kind)
        evidence = CxlEvidence("hmat-cpuless", reason + hint)
        tree.note(f"node {node.id} is taken for CXL memory because {evidence.detail}")
        return replace(node, kind=kind, evidence=evidence)
    near = [distances[cpu][node.id] for cpu in dram if node.id in distances.get(cpu, {})]
    if near and min(near) >= _MIN_CXL_DISTANCE:
        reason = f"it has no CPUs and is at distance {min(near)} from the nearest of them{hint}"
        tree.note(
            f"node {node.id} is taken for CXL memory because {reason}; this is weak evidence "
            "(no DAX device and no HMAT name it)"
        )
        return replace(node, kind=NodeKind.CXL, evidence=CxlEvidence("distance-cpuless", reason))
    tree.note(f"node {node.id} has memory but no CPUs, and nothing says what it is: it has no tier")
    return node


def _judge_by_hmat(
    node: Node, dram: set[int], accesses: tuple[Access, ...]
) -> tuple[NodeKind, str] | None:
    """HBM if faster than every DRAM node, CXL if slower in latency or bandwidth."""
    own = [access for access in accesses if access.target == node.id]
    local = [access for access in accesses if access.target in dram]
    bandwidths = [a.read_bandwidth_bytes_per_s for a in local if a.read_bandwidth_bytes_per_s]
    latencies = [a.read_latency_ns for a in local if a.read_latency_ns]
    for access in own:
        bandwidth, latency = access.read_bandwidth_bytes_per_s, access.read_latency_ns
        if bandwidth and bandwidths and bandwidth > max(bandwidths):
            return NodeKind.HBM, ""
        if latency and latencies and latency > max(latencies):
            reason = f"HMAT gives {latency:.0f} ns against {max(latencies):.0f} ns of DRAM"
            return NodeKind.CXL, f"it has no CPUs and its {reason}"
        if bandwidth and bandwidths and bandwidth < min(bandwidths):
            return NodeKind.CXL, "it has no CPUs and its HMAT bandwidth is below that of DRAM"
    return None
