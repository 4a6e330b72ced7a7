"""Hazards of the kernel's settings: they hold for every process of the machine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cxl_offload.topology.hazards.model import Hazard, Scene
from cxl_offload.units import format_bytes

_DEFAULT_MAP_COUNT = 65530
_TUNED_MAP_COUNT = 1048576
_MOST_BYTES_PER_MAPPING = 2 << 20
_BALANCING = "/proc/sys/kernel/numa_balancing"
_DEMOTION = "/sys/kernel/mm/numa/demotion_enabled"
_HUGE = "/sys/kernel/mm/transparent_hugepage/enabled"
_WEIGHTS = "/sys/kernel/mm/mempolicy/weighted_interleave"
_DAMON = "/sys/kernel/mm/damon/admin/kdamonds"
_DAMON_RECLAIM = "/sys/module/damon_reclaim/parameters/enabled"
_RELEASE = "/proc/sys/kernel/osrelease"


def _numa_balancing(scene: Scene) -> Iterator[Hazard]:
    mode = scene.tree.integer(_BALANCING) or 0
    if mode <= 0 or len(scene.memory_nodes) < 2:
        return
    kinds = {1: "on", 2: "on as memory tiering", 3: "on, with memory tiering"}
    yield Hazard(
        "numa-balancing",
        "warning",
        f"automatic NUMA balancing is {kinds.get(mode, 'on')} (kernel.numa_balancing={mode})",
        "pages without a policy of their own (torch's, the framework's) are unmapped to be "
        "watched, then moved towards whichever CPU touched them: page faults and copies during "
        "the run. Memory of this package has a policy and is not scanned; measured elsewhere, "
        "migration on top of object-level placement made it slower",
        "sudo sysctl -w kernel.numa_balancing=0",
        f"{_BALANCING}; Documentation/admin-guide/sysctl/kernel.rst; Wang et al., Performance "
        "Characterization of CXL Memory and Its Use Cases, section VI",
    )


def _demotion(scene: Scene) -> Iterator[Hazard]:
    if scene.tree.text(_DEMOTION) not in ("true", "1") or not scene.cxl_nodes:
        return
    yield Hazard(
        "demotion",
        "warning",
        f"reclaim may demote pages to slower nodes ({_DEMOTION} is true)",
        "when DRAM runs short, idle pages are moved to the CXL node whatever cpuset or policy "
        "says: tensors placed in DRAM can turn up there, and the CXL node has less room than "
        "its free bytes promise. Pinned pages stay",
        f"echo false | sudo tee {_DEMOTION}",
        f"{_DEMOTION}; Documentation/ABI/testing/sysfs-kernel-mm-numa",
    )


def _swap(scene: Scene) -> Iterator[Hazard]:
    rows = (scene.tree.text("/proc/swaps") or "").splitlines()[1:]
    areas = [row.split() for row in rows if len(row.split()) >= 3]
    total = sum(int(area[2]) << 10 for area in areas if area[2].isdigit())
    if not total:
        return
    swappiness = scene.tree.integer("/proc/sys/vm/swappiness")
    also = "" if swappiness is None else f", vm.swappiness={swappiness}"
    yield Hazard(
        "swap",
        "warning",
        f"{format_bytes(total)} of swap is on ({areas[0][0]}{also})",
        "tensors that are idle for a while, as optimizer states and KV of waiting requests, may "
        "be written to disk; they come back at the speed of the disk, on the nodes of their "
        "policy if there is room. Pinned memory stays",
        "sudo swapoff -a  # or: sudo sysctl -w vm.swappiness=1",
        "/proc/swaps; Documentation/admin-guide/sysctl/vm.rst, swappiness",
    )


def _huge_pages_never(scene: Scene) -> Iterator[Hazard]:
    if "[never]" not in (scene.tree.text(_HUGE) or ""):
        return
    yield Hazard(
        "thp-never",
        "warning",
        f"transparent huge pages are off ({_HUGE} is never)",
        'pages="thp" gets base pages: an entry of the TLB and a page fault for each of them, on '
        "x86 for every 4 KiB instead of 2 MiB",
        f"echo madvise | sudo tee {_HUGE}",
        f"{_HUGE}; Documentation/admin-guide/mm/transhuge.rst",
    )


def _map_count(scene: Scene) -> Iterator[Hazard]:
    limit = scene.tree.integer("/proc/sys/vm/max_map_count")
    if not limit:
        return
    usable = sum(node.capacity_bytes for node in scene.memory_nodes)
    low = limit < _DEFAULT_MAP_COUNT
    if not low and usable / limit <= _MOST_BYTES_PER_MAPPING:
        return
    yield Hazard(
        "max-map-count",
        "warning" if low else "note",
        f"a process may have {limit} mappings, for {format_bytes(usable)} of memory "
        f"(vm.max_map_count={limit})",
        "each hole that a pool returns to the kernel splits a mapping; at the limit memory can no "
        "longer be returned in parts, or mapped at all (reported as out of memory)",
        f"sudo sysctl -w vm.max_map_count={_TUNED_MAP_COUNT}",
        "/proc/sys/vm/max_map_count; Documentation/admin-guide/sysctl/vm.rst, max_map_count",
    )


def _overcommit(scene: Scene) -> Iterator[Hazard]:
    if scene.tree.integer("/proc/sys/vm/overcommit_memory") != 2:
        return
    yield Hazard(
        "strict-overcommit",
        "warning",
        "memory is not overcommitted (vm.overcommit_memory=2)",
        "a mapping counts against the commit limit when it is made, whatever node it is for: "
        "large allocations are refused while nodes have room, and forks of large processes fail",
        "sudo sysctl -w vm.overcommit_memory=0",
        "/proc/sys/vm/overcommit_memory; Documentation/mm/overcommit-accounting.rst",
    )


def _zone_reclaim(scene: Scene) -> Iterator[Hazard]:
    mode = scene.tree.integer("/proc/sys/vm/zone_reclaim_mode") or 0
    if mode <= 0 or len(scene.memory_nodes) < 2:
        return
    yield Hazard(
        "zone-reclaim",
        "warning",
        f"a full node is reclaimed before another is used (vm.zone_reclaim_mode={mode})",
        "filling a node stalls on reclaim of its page cache instead of spilling, even under a "
        "preferred policy that names spill nodes",
        "sudo sysctl -w vm.zone_reclaim_mode=0",
        "/proc/sys/vm/zone_reclaim_mode; Documentation/admin-guide/sysctl/vm.rst",
    )


def _old_kernel(scene: Scene) -> Iterator[Hazard]:
    text = scene.tree.text(_RELEASE) or ""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        return
    version = (int(match.group(1)), int(match.group(2)))
    source = f"{_RELEASE}; Documentation/ABI/testing/sysfs-kernel-mm-mempolicy-weighted-interleave"
    if version < (5, 15):
        yield Hazard(
            "old-kernel",
            "warning",
            f"kernel {text} lacks MPOL_PREFERRED_MANY"
            + (" and MADV_POPULATE_WRITE" if version < (5, 14) else ""),
            "only one node of a preferred list is honoured for pages that come back later, and "
            "(before 5.14) a full node ends the process instead of raising MemoryError",
            "boot a kernel of 6.9 or later",
            f"{_RELEASE}; set_mempolicy(2), madvise(2)",
        )
    elif version < (6, 9) and not scene.tree.exists(_WEIGHTS):
        yield Hazard(
            "no-weighted-interleave",
            "note",
            f"kernel {text} has no weighted interleave (it came with 6.9)",
            "none for tensors of this package, whose weights are kept from user space; the memory "
            "of other allocators (torch's, numactl --weighted-interleave) cannot be weighted",
            "boot a kernel of 6.9 or later",
            source,
        )


def _damon_schemes(scene: Scene) -> Iterator[str]:
    """Actions of running DAMON schemes that take pages from where they are."""
    tree = scene.tree
    for daemon in tree.names(_DAMON, r"\d+"):
        if tree.text(f"{_DAMON}/{daemon}/state") != "on":
            continue
        contexts = f"{_DAMON}/{daemon}/contexts"
        for context in tree.names(contexts, r"\d+"):
            schemes = f"{contexts}/{context}/schemes"
            for scheme in tree.names(schemes, r"\d+"):
                action = tree.text(f"{schemes}/{scheme}/action") or ""
                if action.startswith(("migrate_", "pageout", "cold")):
                    target = tree.text(f"{schemes}/{scheme}/target_nid")
                    moves = action.startswith("migrate_") and target is not None
                    yield f"{action} to node {target}" if moves else action
    if tree.text(_DAMON_RECLAIM) in ("Y", "1"):
        yield "pageout by damon_reclaim"


def _damon(scene: Scene) -> Iterator[Hazard]:
    actions = sorted(set(_damon_schemes(scene)))
    if not actions:
        return
    yield Hazard(
        "damon",
        "warning",
        f"DAMON moves pages by itself ({', '.join(actions)})",
        "its schemes ask no memory policy: tensors leave the node they were placed on, and what a "
        "tuner decides is undone while it measures. Pinned pages stay",
        f"echo off | sudo tee {_DAMON}/*/state  # and sudo damo stop, where damo started it",
        f"{_DAMON}; Documentation/admin-guide/mm/damon/usage.rst",
    )


def _automatic_weights(scene: Scene) -> Iterator[Hazard]:
    if scene.tree.text(f"{_WEIGHTS}/auto") not in ("true", "1", "Y"):
        return
    weights = {
        name.removeprefix("node"): scene.tree.text(f"{_WEIGHTS}/{name}")
        for name in scene.tree.names(_WEIGHTS, r"node\d+")
    }
    if len(weights) < 2:
        return
    shown = ", ".join(f"node {node}: {weight}" for node, weight in weights.items())
    yield Hazard(
        "automatic-weights",
        "note",
        f"the kernel chooses the weights of weighted interleave from firmware data ({shown})",
        "none for tensors of this package, which have weights of their own and leave the kernel's "
        "alone; other programs' weights change when memory is added, until somebody writes one",
        f"echo false | sudo tee {_WEIGHTS}/auto  # only if another program needs fixed weights",
        f"{_WEIGHTS}; Documentation/ABI/testing/sysfs-kernel-mm-mempolicy-weighted-interleave",
    )


KERNEL_CHECKS = (
    _damon,
    _automatic_weights,
    _numa_balancing,
    _demotion,
    _swap,
    _huge_pages_never,
    _map_count,
    _overcommit,
    _zone_reclaim,
    _old_kernel,
)
