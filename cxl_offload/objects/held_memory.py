"""Who holds the host memory of a process: every byte of it by owner, node and size of page."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cxl_offload.objects.mapped_ranges import MappedRange, cached_bytes, read_mapped_ranges
from cxl_offload.units import format_bytes

VERSION = 1
"""Version of the document of :meth:`MemoryReport.to_json`."""

CHECKPOINTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npy", ".npz", ".ckpt")
OTHER = "other anonymous memory"

_LIBRARY = re.compile(r".*\.so(\.[\w.]+)?( \(deleted\))?")


@dataclass(frozen=True, slots=True)
class MemoryHolder:
    """What one owner holds.

    Attributes
    ----------
    owner
        In words, such as ``parameters``.
    resident_bytes
        In memory now.
    nodes
        Node to resident bytes.
    huge_bytes, locked_bytes, swapped_bytes
        In pages larger than the base size; kept from being swapped; swapped out (not resident).
    """

    owner: str
    resident_bytes: int
    nodes: Mapping[int, int] = field(default_factory=dict)
    huge_bytes: int = 0
    locked_bytes: int = 0
    swapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor's storage in host memory.

    Attributes
    ----------
    owner, name
        As of its holder; where in the program, such as ``Net.layers.0.weight``.
    nbytes
        Of the whole storage, resident or not.
    nodes
        Node to resident bytes.
    placed, pinned
        Whether this package allocated it; whether it is registered with a GPU's driver.
    """

    owner: str
    name: str
    nbytes: int
    nodes: Mapping[int, int]
    placed: bool
    pinned: bool


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The host memory of one process at one moment.

    Attributes
    ----------
    pid, seconds
        Of what process, and when (seconds since the epoch).
    holders
        By owner, most bytes first. Their sum is what the process has in memory.
    tensors
        Largest first; empty when another process was asked.
    strays
        What lost its place or its pin, in words.
    cached_files
        Checkpoints that the process maps or has open, to their bytes in the page cache. These are
        the kernel's and not in ``holders``, except the pages that the process maps.
    unused_pool_bytes
        What this package's pools keep for the next tensor: a part of the anonymous memory.
    simulated_session
        Whether the session that places tensors has simulated nodes, which ``placement_of`` tells.
        The nodes of this report are real ones nevertheless.
    """

    pid: int
    seconds: float
    holders: tuple[MemoryHolder, ...]
    tensors: tuple[HeldTensor, ...] = ()
    strays: tuple[str, ...] = ()
    cached_files: Mapping[str, int] = field(default_factory=dict)
    unused_pool_bytes: int = 0
    simulated_session: bool = False

    @property
    def resident_bytes(self) -> int:
        """Resident bytes of all holders."""
        return sum(holder.resident_bytes for holder in self.holders)

    def nodes(self) -> dict[int, int]:
        """Node to bytes, of all holders."""
        return add_nodes(holder.nodes for holder in self.holders)

    def growth_since(self, earlier: MemoryReport) -> dict[str, int]:
        """Owner to the bytes it has more (or fewer) than in an earlier report, most first."""
        before = {holder.owner: holder.resident_bytes for holder in earlier.holders}
        now = {holder.owner: holder.resident_bytes for holder in self.holders}
        changes = {owner: now.get(owner, 0) - before.get(owner, 0) for owner in {**before, **now}}
        grown = sorted(changes.items(), key=lambda item: (-item[1], item[0]))
        return {owner: change for owner, change in grown if change}

    def __str__(self) -> str:
        rows = [
            (each.owner, format_bytes(each.resident_bytes), _by_node(each.nodes))
            for each in self.holders
        ]
        rows.append(("together", format_bytes(self.resident_bytes), _by_node(self.nodes())))
        width = max(len(owner) for owner, *_ in rows)
        lines = [f"{owner:<{width}}  {size:>9}  {where}" for owner, size, where in rows]
        if self.unused_pool_bytes:
            kept = format_bytes(self.unused_pool_bytes)
            lines.append(f"{kept} of the anonymous memory are kept by pools for the next tensor")
        if self.simulated_session:
            told = "the session's are simulated, and placement_of() tells those"
            lines.append(f"the nodes above are real ones; {told}")
        lines += [f"stray: {stray}" for stray in self.strays]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes and seconds; keys of nodes are texts."""
        made: dict[str, Any] = {"version": VERSION, **asdict(self)}
        for row in (*made["holders"], *made["tensors"]):
            row["nodes"] = {str(node): count for node, count in sorted(row["nodes"].items())}
        made["resident_bytes"] = self.resident_bytes
        return made


def _by_node(nodes: Mapping[int, int]) -> str:
    return ", ".join(f"node {node}: {format_bytes(nodes[node])}" for node in sorted(nodes))


def add_nodes(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum by node."""
    total: dict[int, int] = {}
    for nodes in counts:
        for node, count in nodes.items():
            total[node] = total.get(node, 0) + count
    return total


def owner_of(mapped: MappedRange) -> str:
    """The owner of a mapping, judged by its name alone."""
    name = mapped.name.removesuffix(" (deleted)")
    file = name.rsplit("/", 1)[-1]
    if name == "" or name.startswith(("[anon", "/anon_hugepage")):
        return OTHER if mapped.policy == "default" else f"anonymous memory placed {mapped.policy}"
    if name == "[heap]":
        return "heap of the C library"
    if name.startswith("[stack"):
        return "stacks"
    if name.startswith("["):
        return "the kernel's own mappings"
    if name.startswith("/dev/shm/cxl_offload_"):
        return "shared memory of cxl_offload"
    if name.startswith(("/dev/shm/torch_", "/torch_")):
        return "tensors shared between processes (torch)"
    if name.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")):
        return "other shared memory"
    if name.startswith("/dev/"):
        return "devices"
    if file.endswith(CHECKPOINTS):
        return "mapped checkpoints"
    return "programs and libraries" if _LIBRARY.fullmatch(file) else "other mapped files"


def holder(owner: str, parts: Iterable[MappedRange]) -> MemoryHolder:
    """What whole mappings hold together."""
    parts = tuple(parts)
    return MemoryHolder(
        owner,
        sum(part.resident_bytes for part in parts),
        add_nodes(part.nodes for part in parts),
        sum(part.huge_bytes for part in parts),
        sum(part.locked_bytes for part in parts),
        sum(part.swapped_bytes for part in parts),
    )


def report_of_process(pid: int, *, root: str = "/") -> MemoryReport:
    """The memory of any process, as far as its mappings tell.

    Parameters
    ----------
    pid
        Of this user, or of anybody for root. It needs nothing of this package.
    root
        Where ``proc`` is; another folder is a capture.

    Raises
    ------
    CxlOffloadError
        There is no such process, or it belongs to another user.
    """
    by_owner: dict[str, list[MappedRange]] = {}
    ranges = read_mapped_ranges(pid, root=root)
    for mapped in ranges:
        if mapped.resident_bytes or mapped.swapped_bytes:
            by_owner.setdefault(owner_of(mapped), []).append(mapped)
    holders = [holder(owner, parts) for owner, parts in by_owner.items()]
    files = checkpoints_in_use(ranges, Path(root) / "proc" / str(pid))
    return MemoryReport(pid, time.time(), by_size(holders), cached_files=files)


def by_size(holders: Iterable[MemoryHolder]) -> tuple[MemoryHolder, ...]:
    """Most bytes first."""
    return tuple(sorted(holders, key=lambda each: (-each.resident_bytes, each.owner)))


def checkpoints_in_use(ranges: Iterable[MappedRange], process: Path) -> dict[str, int]:
    """Files of weights that a process maps or has open, to their bytes in the page cache."""
    paths = {mapped.name for mapped in ranges if mapped.name.endswith(CHECKPOINTS)}
    try:
        for entry in os.scandir(process / "fd"):
            target = os.readlink(entry.path)
            if target.endswith(CHECKPOINTS):
                paths.add(target)
    except OSError:
        pass  # it ended, or closed a file meanwhile
    cached = {path: cached_bytes(path) for path in sorted(paths)}
    return {path: count for path, count in cached.items() if count}
