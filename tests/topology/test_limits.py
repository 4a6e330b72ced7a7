"""cgroup v1 and v2, in containers and out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxl_offload.topology import Limits, discover
from tests.topology.tree_writer import GIB, TreeWriter

V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "29 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def limits(root: Path, *, cgroup: str, mounts: str, files: dict[str, object]) -> Limits:
    tree = TreeWriter(root, hostname="limits")
    tree.file("proc/meminfo", f"MemTotal:        {(64 * GIB) >> 10} kB")
    for path, value in files.items():
        tree.file(f"sys/fs/cgroup/{path}", value)
    tree.process(cpus="0", mems="0", cgroup=cgroup, mounts=mounts)
    return discover(root).limits


def test_v1_limit_of_the_group(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        cgroup="9:memory:/job\n0::/",
        mounts=V1.format(root="/"),
        files={
            "memory/job/memory.limit_in_bytes": 2 * GIB,
            "memory/job/memory.soft_limit_in_bytes": GIB,
            "memory/job/memory.usage_in_bytes": GIB,
            "memory/memory.limit_in_bytes": 9223372036854771712,
        },
    )
    assert (found.cgroup_version, found.cgroup_path) == (1, "/job")
    assert (found.cgroup_max_bytes, found.cgroup_current_bytes) == (2 * GIB, GIB)
    assert found.cgroup_high_bytes is None


@pytest.mark.parametrize("root", ["/docker/abc", "/elsewhere"])
def test_container_sees_its_own_group_at_the_mount(tmp_path: Path, root: str) -> None:
    found = limits(
        tmp_path,
        cgroup="0::/docker/abc",
        mounts=V2.format(root=root),
        files={"memory.max": 3 * GIB, "memory.current": GIB},
    )
    assert found.cgroup_max_bytes == 3 * GIB
    assert found.cgroup_current_bytes == GIB


def test_the_level_with_the_least_room_counts(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        cgroup="0::/a/b",
        mounts=V2.format(root="/"),
        files={
            "a/memory.max": 10 * GIB,
            "a/memory.current": 9 * GIB,
            "a/memory.high": 8 * GIB,
            "a/b/memory.max": 4 * GIB,
            "a/b/memory.high": "max",
            "a/b/memory.current": 2 * GIB,
        },
    )
    assert (found.cgroup_max_bytes, found.cgroup_current_bytes) == (10 * GIB, 9 * GIB)
    assert found.cgroup_high_bytes == 8 * GIB


def test_no_cgroup_mounted_is_no_limit(tmp_path: Path) -> None:
    found = limits(tmp_path, cgroup="0::/a", mounts="22 1 0:21 / /proc rw - proc proc rw", files={})
    assert found.cgroup_version is None
    assert found.cgroup_max_bytes is None


def test_v2_controller_in_a_hybrid_hierarchy_is_v1(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        cgroup="4:cpu,memory:/x\n0::/y",
        mounts=f"{V2.format(root='/')}\n{V1.format(root='/')}",
        files={"memory/x/memory.limit_in_bytes": GIB, "y/memory.max": 2 * GIB},
    )
    assert (found.cgroup_version, found.cgroup_max_bytes) == (1, GIB)
