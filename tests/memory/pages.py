"""Asks Linux itself where pages are: an oracle that shares no code with the package."""

from __future__ import annotations

import ctypes
import os
from collections import Counter

_LIBC = ctypes.CDLL(None, use_errno=True)
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[os.uname().machine]
PAGE = os.sysconf("SC_PAGE_SIZE")


def nodes_of(address: int, nbytes: int) -> Counter[int]:
    """Pages on every node, for a page-aligned address; negative numbers are -errno."""
    count = -(-nbytes // PAGE)
    pages = (ctypes.c_void_p * count)(*range(address, address + count * PAGE, PAGE))
    status = (ctypes.c_int * count)()
    if _LIBC.syscall(_MOVE_PAGES, 0, ctypes.c_ulong(count), pages, None, status, 0) < 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return Counter(status)


def mappings_over(address: int, nbytes: int) -> int:
    """Number of kernel mappings (VMAs) that the range touches."""
    touched = 0
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(text, 16) for text in line.split()[0].split("-"))
            touched += begin < address + nbytes and end > address
    return touched


def resident_bytes() -> int:
    with open("/proc/self/statm") as text:
        return int(text.read().split()[1]) * PAGE
