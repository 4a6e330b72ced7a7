"""Linux memory calls by ctypes: an oracle, and a stranger, that share no code with the package."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NUMBERS = {"x86_64": (237, 238, 279), "aarch64": (235, 237, 239)}
MBIND, SET_MEMPOLICY, MOVE_PAGES = _NUMBERS[os.uname().machine]
MPOL_DEFAULT, MPOL_PREFERRED = 0, 1
MADV_POPULATE_WRITE = 23
PAGE = os.sysconf("SC_PAGE_SIZE")
NODES = Path("/sys/devices/system/node")


def system_call(number: int, *arguments: object) -> int:
    result = int(_LIBC.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def _mask(nodes: Iterable[int]) -> ctypes.Array[ctypes.c_ulong]:
    words = (ctypes.c_ulong * 2)()
    for node in nodes:
        words[node // 64] |= 1 << node % 64
    return words


def set_thread_policy(mode: int, nodes: Iterable[int] = ()) -> None:
    system_call(SET_MEMPOLICY, mode, _mask(nodes) if mode else None, ctypes.c_ulong(128))


def page_nodes(address: int, nbytes: int) -> list[int]:
    """The node of every base page of a page-aligned range; -errno where there is none."""
    count = -(-nbytes // PAGE)
    pages = (ctypes.c_void_p * count)(*range(address, address + count * PAGE, PAGE))
    status = (ctypes.c_int * count)()
    system_call(MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, status, 0)
    return list(status)


def populate(address: int, nbytes: int) -> None:
    where = (ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    if _LIBC.madvise(*where, MADV_POPULATE_WRITE) != 0:
        raise OSError(ctypes.get_errno(), "madvise")


def anonymous(nbytes: int) -> tuple[mmap.mmap, int]:
    """A private mapping without pages, and its address; it ends with the object."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    mapping = mmap.mmap(-1, nbytes, flags=flags)
    return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def mappings_over(address: int, nbytes: int) -> int:
    """Number of kernel mappings (VMAs) that the range touches."""
    ends = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text())
    ranges = [(int(begin, 16), int(end, 16)) for begin, end in ends]
    return sum(begin < address + nbytes and end > address for begin, end in ranges)


def mapped_file(address: int) -> str:
    """The path of the file whose mapping an address lies in, or "" for memory of no file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end:
            return path[0] if int(inode) else ""
    raise ValueError(f"nothing is mapped at {address:#x}")


def meminfo_bytes(node: int, name: str) -> int:
    text = (NODES / f"node{node}/meminfo").read_text()
    found = re.search(rf"{re.escape(name)}:\s+(\d+)", text)
    assert found, f"{name} of node {node}"
    return int(found[1]) << 10


def available_bytes(node: int) -> int:
    """Free, or free at once: the page cache is given back before a page comes from elsewhere."""
    return sum(meminfo_bytes(node, name) for name in ("MemFree", "Active(file)", "Inactive(file)"))


def oom_kills() -> int:
    """Processes that the kernel has killed for want of memory since it booted."""
    found = re.search(r"(?m)^oom_kill (\d+)", Path("/proc/vmstat").read_text())
    assert found
    return int(found[1])
