"""Hazards of the process and its container: what they may not see, ask for or hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cxl_offload.topology.cpulist import format_cpulist
from cxl_offload.topology.hazards.model import Hazard, Scene
from cxl_offload.units import GIB, format_bytes

_SYS_NICE = 23  # CAP_SYS_NICE, linux/capability.h
_SECCOMP_FILTER = 2
_STATUS = "/proc/self/status"


def _cpuset(scene: Scene) -> Iterator[Hazard]:
    hidden = [node.id for node in scene.memory_nodes if not node.allowed]
    if not hidden:
        return
    lost = sum(node.capacity_bytes for node in scene.memory_nodes if not node.allowed)
    allowed = scene.machine.limits.mems_allowed or ()
    every = format_cpulist(sorted({*allowed, *hidden}))
    yield Hazard(
        "cpuset",
        "error",
        f"the cpuset of this process hides node {format_cpulist(hidden)} "
        f"(Mems_allowed_list: {format_cpulist(allowed) or 'none'})",
        f"{format_bytes(lost)} cannot be used: policies that name these nodes are refused",
        f"docker run --cpuset-mems={every} ...  # or write {every} to cpuset.mems of its cgroup",
        f"{_STATUS}; cpuset(7)",
    )


def _cgroup(scene: Scene) -> Iterator[Hazard]:
    limits = scene.machine.limits
    usable = sum(node.capacity_bytes for node in scene.memory_nodes if node.allowed)
    most = limits.cgroup_max_bytes
    if most is None or most >= usable:
        return
    yield Hazard(
        "cgroup-limit",
        "warning",
        f"the cgroup of this process may hold {format_bytes(most)} of "
        f"{format_bytes(usable)} that its nodes have",
        "memory of every tier counts against it, CXL too: allocations beyond it are refused here, "
        "and a process that passes it by touching other memory is killed",
        "docker run --memory=0 ...  # or raise memory.max of its cgroup",
        f"memory.max of {limits.cgroup_path}; Documentation/admin-guide/cgroup-v2.rst",
    )


def _status(scene: Scene, name: str, base: int) -> int | None:
    match = re.search(rf"(?m)^{name}:\s*([0-9a-fA-F]+)$", scene.tree.text(_STATUS) or "")
    return int(match.group(1), base) if match else None


def _placing(scene: Scene) -> Iterator[Hazard]:
    cost = (
        "no page can be placed or asked where it is: every policy but first touch fails with "
        "EPERM, which the error names"
    )
    remedy = "docker run --cap-add SYS_NICE ...  # or a seccomp profile that allows mbind, "
    remedy += "set_mempolicy, get_mempolicy and move_pages"
    if scene.placing_refused is not None:
        yield Hazard(
            "placing-refused",
            "error",
            f"the kernel refused to place a page: {scene.placing_refused}",
            cost,
            remedy,
            "tried on one page of this process; Docker's default seccomp profile",
        )
    if scene.tried:
        return
    seccomp, capabilities = _status(scene, "Seccomp", 10), _status(scene, "CapEff", 16)
    if seccomp != _SECCOMP_FILTER or capabilities is None or capabilities >> _SYS_NICE & 1:
        return
    yield Hazard(
        "placing-refused",
        "warning",
        "a seccomp filter is on and the process lacks CAP_SYS_NICE: placing pages may be refused",
        cost,
        remedy,
        f"Seccomp and CapEff in {_STATUS}; Docker's default seccomp profile",
    )


def _locked_memory(scene: Scene) -> Iterator[Hazard]:
    limit = scene.machine.limits.memlock_bytes
    usable = sum(node.capacity_bytes for node in scene.memory_nodes if node.allowed)
    if limit is None or limit >= min(usable, 1024 * GIB):
        return
    capabilities = _status(scene, "CapEff", 16)
    if capabilities is not None and capabilities >> 14 & 1:  # CAP_IPC_LOCK lifts the limit
        return
    yield Hazard(
        "memlock",
        "note",
        f"this process may lock {format_bytes(limit)} (ulimit -l)",
        "io_uring fixed buffers, RDMA registration and mlock of more fail with ENOMEM",
        "ulimit -l unlimited  # docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd",
        "/proc/self/limits; getrlimit(2), RLIMIT_MEMLOCK",
    )


PROCESS_CHECKS = (_cpuset, _cgroup, _placing, _locked_memory)
