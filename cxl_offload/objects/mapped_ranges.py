"""The mappings of any process, as the kernel tells them: bytes in memory, nodes, sizes of pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cxl_offload.errors import CxlOffloadError
from cxl_offload.units import KIB

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) [0-9a-f]+ \S+ \d+\s*(.*)")
_HUGE = ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
_HUGETLB = ("Shared_Hugetlb", "Private_Hugetlb")


@dataclass(frozen=True, slots=True)
class MappedRange:
    """One mapping of a process.

    Attributes
    ----------
    begin, end
        Its addresses.
    name
        The file, or a name in brackets such as ``[heap]``; empty for anonymous memory.
    shared
        As mapped.
    resident_bytes
        In memory now.
    huge_bytes
        Of the resident ones, in pages larger than the base size.
    locked_bytes
        Of the resident ones, kept from being swapped by ``mlock``.
    swapped_bytes
        Not in memory, but in swap.
    nodes
        Node to resident bytes.
    policy
        The memory policy of these addresses in the kernel's words, such as ``bind:1``.
    """

    begin: int
    end: int
    name: str
    shared: bool
    resident_bytes: int
    huge_bytes: int
    locked_bytes: int
    swapped_bytes: int
    nodes: Mapping[int, int] = field(default_factory=dict)
    policy: str = "default"


def read_mapped_ranges(pid: int | None = None, *, root: str = "/") -> tuple[MappedRange, ...]:
    """All mappings of a process, by address.

    Parameters
    ----------
    pid
        None means this process.
    root
        Where ``proc`` is; another folder is a capture.

    Raises
    ------
    CxlOffloadError
        There is no such process, or it belongs to another user.

    Notes
    -----
    ``smaps`` and ``numa_maps`` are read one after the other. What a running process maps or frees
    in between is in one of them only, so the bytes of nodes may differ from the resident ones.
    A kernel without NUMA has no ``numa_maps``: all bytes count as those of node 0.
    """
    folder = Path(root) / "proc" / ("self" if pid is None else str(pid))
    smaps = _read(folder / "smaps", pid)
    if not smaps and pid is not None:
        raise CxlOffloadError(f"process {pid} has no memory: a kernel thread, or one that ended")
    numa = _numa(_read(folder / "numa_maps", pid)) if (folder / "numa_maps").exists() else None
    return tuple(_ranges(smaps, numa))


def _read(path: Path, pid: int | None) -> str:
    process = "this process" if pid is None else f"process {pid}"
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise CxlOffloadError(f"{process}: there is none of this number") from None
    except PermissionError:
        raise CxlOffloadError(
            f"{process} belongs to another user: run this command as that user, or as root"
        ) from None


def _numa(text: str) -> dict[int, tuple[str, dict[int, int]]]:
    """Begin of a mapping to its policy and its bytes by node."""
    found = {}
    for line in text.splitlines():
        begin, policy, *words = line.split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        page = int(values.get("kernelpagesize_kB", "4")) * KIB
        nodes = {
            int(name[1:]): int(count) * page
            for name, count in values.items()
            if name[0] == "N" and name[1:].isdigit()
        }
        found[int(begin, 16)] = policy, nodes
    return found


def _ranges(
    smaps: str, numa: dict[int, tuple[str, dict[int, int]]] | None
) -> Iterator[MappedRange]:
    head: re.Match[str] | None = None
    fields: dict[str, int] = {}
    for line in (*smaps.splitlines(), ""):
        match = _HEAD.fullmatch(line)
        if match is None and line:
            name, _, value = line.partition(":")
            if value.endswith(" kB"):
                fields[name] = int(value[:-3]) * KIB
            continue
        if head is not None:
            yield _range(head, fields, numa)
        head, fields = match, {}


def _range(
    head: re.Match[str],
    fields: dict[str, int],
    numa: dict[int, tuple[str, dict[int, int]]] | None,
) -> MappedRange:
    begin, end = int(head[1], 16), int(head[2], 16)
    # Pages of a huge-page pool are in fields of their own and in no other.
    pool = sum(fields.get(name, 0) for name in _HUGETLB)
    resident = fields.get("Rss", 0) + pool
    policy, nodes = "default", {0: resident} if resident else {}
    if numa is not None:
        policy, nodes = numa.get(begin, ("default", {}))
    return MappedRange(
        begin=begin,
        end=end,
        name=head[4],
        shared=head[3][3] == "s",
        resident_bytes=resident,
        huge_bytes=sum(fields.get(name, 0) for name in _HUGE),
        locked_bytes=fields.get("Locked", 0),
        swapped_bytes=fields.get("Swap", 0),
        nodes=nodes,
        policy=policy,
    )


def cached_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes of a file that lie in the page cache; 0 where that cannot be asked.

    The cache is the kernel's: it is no process's memory, and goes first when memory is short. Of a
    file that the caller neither owns nor may write the kernel calls every page cached.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return 0
            mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE)
    except (OSError, ValueError):
        return 0
    pages = -(-size // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * pages)()
    with mapping:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), seen)
    return 0 if failed else min(size, (pages - bytes(seen).count(0)) * mmap.PAGESIZE)
