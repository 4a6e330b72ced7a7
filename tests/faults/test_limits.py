"""Limits of the process that the kernel enforces: mappings, address space, threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")

HOLES = """
import ctypes, mmap
from cxl_offload.memory import Bind, Session
from tests.memory.pages import PAGE, nodes_of

session = Session.linux()
blocks = [session.allocate(PAGE, Bind((0,))) for _ in range(4096)]
for block in blocks:
    ctypes.memset(block.address, 7, PAGE)
limit = int(open("/proc/sys/vm/max_map_count").read())
hog = mmap.mmap(-1, (limit + 1000) * PAGE)
base = ctypes.addressof(ctypes.c_char.from_buffer(hog))
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for page in range(0, limit + 1000, 2):
    if libc.mprotect(base + page * PAGE, PAGE, mmap.PROT_READ) != 0:
        break
else:
    raise SystemExit("the limit was never reached")
gone = [block.address for block in blocks[1::2]]
del blocks[1::2], block
session.trim()
absent = sum(nodes_of(address, PAGE)[-2] + nodes_of(address, PAGE)[-14] for address in gone)
print("absent", absent, "of", len(gone))
assert absent >= len(gone) - 16, "pages of holes that could not be unmapped were kept"
live = sum(block.held_bytes for block in blocks)
assert session.stats().mapped_bytes.current <= live + 64 * PAGE
assert all(ctypes.string_at(block.address, 2) == b"\\x07\\x07" for block in blocks)
libc.mprotect(base, (limit + 1000) * PAGE, mmap.PROT_READ)
again = [session.allocate(PAGE, Bind((0,))) for _ in range(2048)]
for one in again:
    ctypes.memset(one.address, 9, PAGE)
assert all(ctypes.string_at(block.address, 2) == b"\\x07\\x07" for block in blocks)
"""

THREADS = """
import resource
from cxl_offload.memory import Bind, Session
from cxl_offload import _C, discover

session = Session(_C.linux_kernel(), discover(), max_threads=8)
size = 192 << 20
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
stack = 8 << 20
resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_AS, (used + size + stack // 2, resource.RLIM_INFINITY))
block = session.allocate(size, Bind((0,)))
assert block.bytes_per_node() == {0: size}
try:
    session.allocate(size, Bind((0,)))
except MemoryError as error:
    assert "RLIMIT_AS" in str(error), error
else:
    raise SystemExit("more address space than the limit allows")
assert session.stats().mapped_bytes.current == size
del block
assert session.allocate(size, Bind((0,))).nbytes == size
"""

HELPERS = """
import resource
from cxl_offload import _C
from cxl_offload.memory import Session
from cxl_offload.transfer import CopyEngine, HostCopier
from tests.faults.ground import simulated

cpu = _C.allowed_cpus()[0]
session = simulated(1 << 30, driver=_C.FakeDriver())
copier = HostCopier(cpus=[cpu])
HostCopier(cpus=[cpu] * 4)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
stack = 64 << 20
resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_AS, (used + 5 * stack // 2, resource.RLIM_INFINITY))
try:
    HostCopier(cpus=[cpu] * 200)
except OSError as error:
    assert "no further thread could be made" in str(error), error
else:
    raise SystemExit("more threads than the limit allows")
engines = []
try:
    for _ in range(20):
        engines.append(CopyEngine(session, staging_bytes=0, copier=copier))
except OSError as error:
    assert "no further thread could be made" in str(error), error
else:
    raise SystemExit("more threads than the limit allows")
"""


def run(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_holes_give_their_pages_back_at_the_limit_of_mappings() -> None:
    limit = int(MAX_MAP_COUNT.read_text())
    if limit > 300_000:
        pytest.skip(f"vm.max_map_count is {limit}: filling it takes too long")
    run(HOLES)


def test_memory_is_faulted_in_by_fewer_threads_when_no_more_can_be_had() -> None:
    run(THREADS)


def test_threads_that_cannot_be_made_are_an_error_and_end_nothing() -> None:
    run(HELPERS)
