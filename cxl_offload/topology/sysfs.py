"""Nodes, CPUs, memory, zones, distances and HMAT as the kernel shows them.

Sources: Documentation/ABI/stable/sysfs-devices-node and testing/sysfs-devices-memory,
Documentation/admin-guide/mm/numaperf.rst, proc(5).
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter

from cxl_offload.topology.cpulist import format_cpulist, parse_cpulist
from cxl_offload.topology.links import Access
from cxl_offload.topology.node import BlockGroup, HugePagePool, Node, NodeKind, Zone
from cxl_offload.topology.tree import Tree
from cxl_offload.units import format_bytes

NODES = "/sys/devices/system/node"
_MEMORY = "/sys/devices/system/memory"
_CPUS = "/sys/devices/system/cpu"
_MEGABYTE = 10**6  # HMAT bandwidths are shown in MB/s
_MEMINFO = re.compile(r"(?:Node\s+\d+\s+)?([\w()]+):\s+(\d+) kB")
_ZONE = re.compile(r"Node (\d+), zone\s+(\w+)")
_ZONE_VALUE = re.compile(r"\s+(?:pages )?(free|managed)\s+(\d+)")


def read_list(tree: Tree, path: str) -> tuple[int, ...] | None:
    """A cpulist or nodelist file; one that is no list is noted and reads as absent."""
    text = tree.text(path)
    if text is None:
        return None
    try:
        return parse_cpulist(text)
    except ValueError as error:
        tree.note(f"{path}: {error}")
        return None


def read_nodes(tree: Tree, *, mems_allowed: tuple[int, ...] | None) -> tuple[Node, ...]:
    """Every possible node; those without CPUs are still ``UNKNOWN`` (cxl.py and gpu.py decide).

    Without /sys/devices/system/node (a kernel without NUMA) the machine is one node.
    """
    present = [int(name[4:]) for name in tree.names(NODES, r"node\d+")]
    if not present:
        return (_only_node(tree),)
    online = read_list(tree, f"{NODES}/online")
    possible = read_list(tree, f"{NODES}/possible") or ()
    zones = _read_zones(tree, base_page_bytes(tree))
    nodes = []
    for node_id in sorted({*present, *possible}):
        is_online = node_id in (present if online is None else online)
        allowed = mems_allowed is None or node_id in mems_allowed
        if is_online and node_id in present:
            nodes.append(_read_node(tree, node_id, zones.get(node_id, ()), allowed=allowed))
        else:
            nodes.append(
                Node(node_id, NodeKind.UNKNOWN, (), 0, None, allowed=allowed, online=False)
            )
    _note_absent_memory(tree, nodes)
    return tuple(nodes)


def _only_node(tree: Tree) -> Node:
    tree.note(f"no {NODES}: this kernel has no NUMA, so all memory is node 0")
    memory = _read_meminfo(tree, "/proc/meminfo")
    cpus = read_list(tree, f"{_CPUS}/online") or ()
    zones = _read_zones(tree, base_page_bytes(tree)).get(0, ())
    total = memory.get("MemTotal", 0)
    cache = _page_cache_bytes(memory)
    free = memory.get("MemFree")
    return Node(0, NodeKind.DRAM, cpus, total, free, zones=zones, page_cache_bytes=cache)


def _read_node(tree: Tree, node_id: int, zones: tuple[Zone, ...], *, allowed: bool) -> Node:
    folder = f"{NODES}/node{node_id}"
    cpus = read_list(tree, f"{folder}/cpulist") or ()
    memory = _read_meminfo(tree, f"{folder}/meminfo")
    if "MemTotal" not in memory:
        tree.note(f"node {node_id}: its memory is unknown ({folder}/meminfo), so it is not used")
    blocks = _read_blocks(tree, folder)
    installed = sum(group.total_bytes for group in blocks) or None
    return Node(
        id=node_id,
        kind=NodeKind.DRAM if cpus else NodeKind.UNKNOWN,
        cpus=cpus,
        capacity_bytes=memory.get("MemTotal", 0),
        free_bytes=memory.get("MemFree"),
        allowed=allowed,
        installed_bytes=installed,
        socket=tree.integer(f"{_CPUS}/cpu{cpus[0]}/topology/physical_package_id") if cpus else None,
        llc_bytes=_read_llc(tree, cpus),
        zones=zones,
        blocks=blocks,
        huge_pages=_read_huge_pages(tree, folder),
        page_cache_bytes=_page_cache_bytes(memory),
    )


def _note_absent_memory(tree: Tree, nodes: list[Node]) -> None:
    offline = [node.id for node in nodes if not node.online]
    if offline:
        verb = "is" if len(offline) == 1 else "are"
        tree.note(f"node {format_cpulist(offline)} {verb} possible but offline")
    for node in nodes:
        idle = sum(group.total_bytes for group in node.blocks if group.state == "offline")
        if idle:
            tree.note(
                f"node {node.id}: {format_bytes(idle)} of its memory is offline; write "
                "online_kernel (pins stay) or online_movable (pins move pages away) to "
                f"{NODES}/node{node.id}/memory*/state"
            )


def _read_meminfo(tree: Tree, path: str) -> dict[str, int]:
    """Bytes by name, of a node's or the system's meminfo."""
    return {name: int(kib) << 10 for name, kib in _MEMINFO.findall(tree.text(path) or "")}


def _page_cache_bytes(memory: dict[str, int]) -> int:
    return memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)


def base_page_bytes(tree: Tree) -> int:
    """Base page size: asked of a live system; in a capture, a PMD entry maps page^2/8 bytes."""
    if tree.live:
        return os.sysconf("SC_PAGE_SIZE")
    path = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
    if not tree.exists(path):
        return 4096
    page = math.isqrt(8 * (tree.integer(path) or 0))
    return page if page in (4096, 16384, 65536) else 4096


def _read_zones(tree: Tree, page_bytes: int) -> dict[int, tuple[Zone, ...]]:
    """Zones with memory, by node (/proc/zoneinfo)."""
    zones: dict[int, list[Zone]] = {}
    for section in re.split(r"(?m)^(?=Node )", tree.text("/proc/zoneinfo") or ""):
        head = _ZONE.match(section)
        if head is None:
            continue
        # "pages free" comes first; a per-CPU or per-node counter of the same name comes later
        values: dict[str, int] = {}
        for name, pages in _ZONE_VALUE.findall(section):
            values.setdefault(name, int(pages) * page_bytes)
        if values.get("managed"):
            zone = Zone(head.group(2), values["managed"], values.get("free"))
            zones.setdefault(int(head.group(1)), []).append(zone)
    return {node_id: tuple(found) for node_id, found in zones.items()}


def _read_blocks(tree: Tree, folder: str) -> tuple[BlockGroup, ...]:
    size = tree.integer(f"{_MEMORY}/block_size_bytes", base=16)
    if size is None:
        return ()
    groups = Counter(
        (
            tree.text(f"{_MEMORY}/{name}/state") or "unknown",
            tree.text(f"{_MEMORY}/{name}/valid_zones") or "",
        )
        for name in tree.names(folder, r"memory\d+")
    )
    return tuple(
        BlockGroup(state, zones, count, count * size)
        for (state, zones), count in sorted(groups.items())
    )


def _read_huge_pages(tree: Tree, folder: str) -> tuple[HugePagePool, ...]:
    pools = []
    for name in tree.names(f"{folder}/hugepages", r"hugepages-\d+kB"):
        pool = f"{folder}/hugepages/{name}"
        total = tree.integer(f"{pool}/nr_hugepages")
        if total is not None:
            free = tree.integer(f"{pool}/free_hugepages") or 0
            surplus = tree.integer(f"{pool}/surplus_hugepages") or 0
            pools.append(HugePagePool(int(name[10:-2]) << 10, total, free, surplus))
    return tuple(pools)


def _read_llc(tree: Tree, cpus: tuple[int, ...]) -> int | None:
    """Bytes of the last-level caches that the CPUs of a node share, each cache once."""
    if not cpus:
        return None
    levels = {
        tree.integer(f"{_CPUS}/cpu{cpus[0]}/cache/{index}/level") or 0: index
        for index in tree.names(f"{_CPUS}/cpu{cpus[0]}/cache", r"index\d+")
    }
    if not levels:
        return None
    index, caches = levels[max(levels)], dict[str, int]()
    for cpu in cpus:
        folder = f"{_CPUS}/cpu{cpu}/cache/{index}"
        match = re.fullmatch(r"(\d+)K", tree.text(f"{folder}/size") or "")
        if match:
            caches[tree.text(f"{folder}/shared_cpu_list") or str(cpu)] = int(match.group(1)) << 10
    return sum(caches.values()) or None


def read_distances(tree: Tree, nodes: tuple[Node, ...]) -> dict[int, dict[int, int]]:
    """Rows of online nodes. The kernel's columns are the online nodes, not all ids in between."""
    online = [node.id for node in nodes if node.online]
    rows: dict[int, dict[int, int]] = {}
    for node_id in online:
        path = f"{NODES}/node{node_id}/distance"
        text = tree.text(path)
        if text is None:
            continue
        values = text.split()
        if len(values) != len(online) or not all(value.isdigit() for value in values):
            tree.note(f"{path} holds {text!r}, not one distance for each of {len(online)} nodes")
            continue
        rows[node_id] = dict(zip(online, map(int, values), strict=True))
    return rows


def read_accesses(tree: Tree, nodes: tuple[Node, ...]) -> tuple[Access, ...]:
    """HMAT latency and bandwidth of each target from its best CPU initiators.

    The kernel shows only the best initiators of a target: what node 0 reaches on node 1 is not
    there. Class 1 counts CPUs only; class 0, on older kernels the only one, also accelerators.
    """
    with_cpus = {node.id for node in nodes if node.cpus}
    found = []
    for node in nodes:
        for name in ("access1", "access0"):
            folder = f"{NODES}/node{node.id}/{name}/initiators"
            values = {
                entry: tree.integer(f"{folder}/{entry}") or None
                for entry in ("read_latency", "write_latency", "read_bandwidth", "write_bandwidth")
            }
            if not any(values.values()):
                continue
            initiators = [int(link[4:]) for link in tree.names(folder, r"node\d+")]
            found += [
                _access(initiator, node.id, values, f"HMAT {name}")
                for initiator in initiators
                if initiator in with_cpus
            ]
            if any(initiator in with_cpus for initiator in initiators):
                break
            tree.note(
                f"node {node.id}: {name} shows {_shown(values)} but links no CPU initiator; "
                "not used, measure instead"
            )
    return tuple(sorted(found, key=lambda access: (access.initiator, access.target)))


def _access(initiator: int, target: int, values: dict[str, int | None], source: str) -> Access:
    def bytes_per_s(name: str) -> float | None:
        value = values[name]
        return None if value is None else float(value * _MEGABYTE)

    def ns(name: str) -> float | None:
        value = values[name]
        return None if value is None else float(value)

    return Access(
        initiator,
        target,
        ns("read_latency"),
        ns("write_latency"),
        bytes_per_s("read_bandwidth"),
        bytes_per_s("write_bandwidth"),
        source,
    )


def _shown(values: dict[str, int | None]) -> str:
    units = {"latency": "ns", "bandwidth": "MB/s"}
    return ", ".join(
        f"{name} {value} {units[name.split('_')[1]]}" for name, value in values.items() if value
    )
