"""What cpuset, cgroup and rlimit leave to this process (proc(5), cgroups(7))."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from cxl_offload.topology.cpulist import parse_cpulist
from cxl_offload.topology.model import Limits
from cxl_offload.topology.tree import Tree

# cgroup v1 writes "no limit" as the largest multiple of a page below 2^63
_NO_LIMIT = 1 << 62
_MEMLOCK = re.compile(r"(?m)^Max locked memory\s+(\S+)")


@dataclass(frozen=True, slots=True)
class _Group:
    """Where this process's memory cgroup is mounted, and its path below that."""

    version: Literal[1, 2]
    mount: str
    path: str


def read_limits(tree: Tree) -> Limits:
    """Limits of the process that reads, or of the one that a tree was captured in."""
    status = tree.text("/proc/self/status") or ""
    group = _memory_group(tree)
    limits = Limits(
        mems_allowed=_status_list(tree, status, "Mems_allowed_list"),
        cpus_allowed=_status_list(tree, status, "Cpus_allowed_list"),
        memlock_bytes=_memlock(tree),
    )
    if group is None:
        return limits
    levels = [_level(tree, group, folder) for folder in _ancestors(group)]
    highs = [high for _, high, _ in levels if high is not None]
    bounded = [level for level in levels if level[0] is not None]
    # the level with the least room is the one that will refuse
    tightest = min(bounded, key=lambda level: (level[0] or 0) - (level[2] or 0), default=levels[0])
    return Limits(
        mems_allowed=limits.mems_allowed,
        cpus_allowed=limits.cpus_allowed,
        memlock_bytes=limits.memlock_bytes,
        cgroup_version=group.version,
        cgroup_path=group.path,
        cgroup_max_bytes=tightest[0],
        cgroup_high_bytes=min(highs, default=None),
        cgroup_current_bytes=tightest[2],
    )


def _status_list(tree: Tree, status: str, name: str) -> tuple[int, ...] | None:
    match = re.search(rf"(?m)^{name}:[ \t]*(\S*)$", status)
    if match is None:
        tree.note(f"/proc/self/status has no {name}: every node and CPU counts as allowed")
        return None
    try:
        return parse_cpulist(match.group(1))
    except ValueError as error:
        tree.note(f"/proc/self/status, {name}: {error}; every node and CPU counts as allowed")
        return None


def _memlock(tree: Tree) -> int | None:
    match = _MEMLOCK.search(tree.text("/proc/self/limits") or "")
    if match is None or not match.group(1).isdigit():
        return None  # "unlimited"
    return int(match.group(1))


def _memory_group(tree: Tree) -> _Group | None:
    """The cgroup that accounts this process's memory: v1 where its controller is, else v2."""
    paths: dict[int, str] = {}
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            paths[1] = path
        elif line.startswith("0::"):
            paths[2] = path
    mounts = _mounts(tree)
    if 1 in paths and 1 in mounts:
        mount, root = mounts[1]
        return _Group(1, mount, _below(paths[1], root))
    if 2 in paths and 2 in mounts:
        mount, root = mounts[2]
        return _Group(2, mount, _below(paths[2], root))
    return None


def _mounts(tree: Tree) -> dict[int, tuple[str, str]]:
    """Mount point and root of the memory hierarchies, by version (/proc/self/mountinfo)."""
    found: dict[int, tuple[str, str]] = {}
    for line in (tree.text("/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, system = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(system) < 3:
            continue
        if system[0] == "cgroup2":
            found.setdefault(2, (fields[4], fields[3]))
        elif system[0] == "cgroup" and "memory" in system[2].split(","):
            found.setdefault(1, (fields[4], fields[3]))
    return found


def _below(path: str, root: str) -> str:
    """``path`` as seen from a mount whose root is the group ``root``."""
    if root in ("/", ""):
        return path
    pure = PurePosixPath(path)
    return "/" + str(pure.relative_to(root)).strip(".") if pure.is_relative_to(root) else "/"


def _ancestors(group: _Group) -> list[str]:
    """Folders of the group and of all its parents below the mount, the group first."""
    pure = PurePosixPath(group.path if group.path.startswith("/") else "/")
    return [str(part).strip("/") for part in (pure, *pure.parents)]


def _level(tree: Tree, group: _Group, folder: str) -> tuple[int | None, int | None, int | None]:
    """Maximum, high and current bytes of one level; ``None`` for no limit."""
    base = f"{group.mount}/{folder}".rstrip("/")
    if group.version == 1:  # its soft limit only guides reclaim, it throttles nobody
        limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        return _amount(tree, f"{base}/{limit}"), None, _amount(tree, f"{base}/{usage}")
    maximum, high, current = (
        _amount(tree, f"{base}/memory.{name}") for name in ("max", "high", "current")
    )
    return maximum, high, current


def _amount(tree: Tree, path: str) -> int | None:
    text = tree.text(path)
    if text is None or text == "max":
        return None
    value = int(text) if text.isdigit() else None
    return None if value is None or value >= _NO_LIMIT else value
