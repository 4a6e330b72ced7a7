"""Where malloc takes a tensor from, asked of malloc itself."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

BLOCKS = """
import ctypes
import torch
from cxl_offload.memory.heap import keep_freed_memory

FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]
mallinfo = ctypes.CDLL(None).mallinfo2
mallinfo.restype = Info

if {keep}:
    assert keep_freed_memory()
before = mallinfo().hblkhd
block = torch.ones(20 << 20, dtype=torch.uint8)
mapped = mallinfo().hblkhd - before
heap = mallinfo().arena
del block
print(mapped, heap - mallinfo().arena)
"""


def mapped_and_given_back(*, keep: bool) -> tuple[int, int]:
    """Bytes of a block of 20 MiB that were mapped for it, and that left the heap with it."""
    code = BLOCKS.format(keep=keep)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    mapped, left = map(int, done.stdout.split())
    return mapped, left


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc that does not say what it has"
)
def test_large_blocks_come_from_the_heap_and_stay_there() -> None:
    assert mapped_and_given_back(keep=False)[0] >= 20 << 20
    assert mapped_and_given_back(keep=True) == (0, 0)
