"""Memory that fails when a test says so."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import threading

USED, EARLY = 4, 5
"""BUS_MCEERR_AR and BUS_MCEERR_AO of asm-generic/siginfo.h."""

_BUS = 7
_SEND = {"x86_64": 297, "aarch64": 240}[platform.machine()]
_PAGE_BITS = mmap.PAGESIZE.bit_length() - 1


def lose(address: int, *, code: int = USED) -> None:
    """The page at an address fails: the kernel's own signal, sent to this thread by itself."""
    begins = struct.pack("iiiiQh", _BUS, 0, code, 0, address, _PAGE_BITS)
    thread = threading.get_native_id()
    sent = ctypes.CDLL(None, use_errno=True).syscall(
        _SEND, os.getpid(), thread, _BUS, begins.ljust(128, b"\0")
    )
    if sent != 0:
        raise OSError(ctypes.get_errno(), "rt_tgsigqueueinfo")
