"""The heap of malloc, which torch's tensors in ordinary memory come from."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_KEPT = 32 << 20
"""glibc takes no more: larger blocks are mapped again each time."""

_MOST_FREE = 1 << 30


def keep_freed_memory() -> bool:
    """Let malloc reuse blocks up to 32 MiB instead of giving them back to the kernel.

    A program that frees and makes activations of some MiB for every layer otherwise pays for page
    faults, depending on what it allocated before: in decoding up to 20000 a token (measured). It
    holds for the whole process and is not undone; up to 1 GiB that is free stays with the process.

    Returns
    -------
    bool
        Whether the C library knows how (glibc does).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_TRIM_THRESHOLD, _MOST_FREE), (_M_MMAP_THRESHOLD, _LARGEST_KEPT))
    return all(mallopt(name, value) == 1 for name, value in settings)
