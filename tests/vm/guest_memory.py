"""Inside a machine with several nodes: every policy, asked of the pages of a real kernel.

The nodes are those of the machine's own file; nothing here knows which machine it is.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest

from cxl_offload.memory import Bind, Interleave, Memory, Policy, Preferred, Weighted
from cxl_offload.topology import discover
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
NODES = [node.id for node in SPEC.nodes]
FAR = NODES[-1]
KIB, MIB = 1 << 10, 1 << 20
SIZE = 12 * MIB
KHUGEPAGED = Path("/sys/kernel/mm/transparent_hugepage/khugepaged")

POLICIES: list[Policy] = [
    *(Bind((node,)) for node in NODES),
    *(Preferred((node,)) for node in NODES),
    Bind((FAR, 0)),
    *(Interleave((0, FAR), granule_bytes=granule) for granule in (4 * KIB, 64 * KIB, 2 * MIB)),
    Interleave(tuple(NODES), granule_bytes=64 * KIB),
    *(Weighted({0: 3, FAR: 1}, granule_bytes=granule) for granule in (4 * KIB, 64 * KIB)),
    Weighted(dict(zip(NODES, (4, 2, 1, 1, 1), strict=False)), granule_bytes=64 * KIB),
    Weighted({0: 2, FAR: 1}, granule_bytes=2 * MIB),
]


def expected_shares(policy: Policy, nbytes: int) -> dict[int, Fraction]:
    """Bytes of every node by the meaning of the policy, worked out without the package."""
    if isinstance(policy, (Bind, Preferred)):
        return {policy.nodes[0]: Fraction(nbytes)}
    weights = policy.weights if isinstance(policy, Weighted) else dict.fromkeys(policy.nodes, 1)
    total = sum(weights.values())
    return {node: Fraction(nbytes * weight, total) for node, weight in weights.items()}


def node_of(address: int) -> int:
    """The node of one page, asked from the kernel by move_pages without a target."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages, status = (ctypes.c_void_p * 1)(address), (ctypes.c_int * 1)()
    assert libc.syscall(279, 0, ctypes.c_ulong(1), pages, None, status, 0) == 0
    return int(status[0])


def free_kib(node: int) -> int:
    for line in Path(f"/sys/devices/system/node/node{node}/meminfo").read_text().splitlines():
        if "MemFree:" in line:
            return int(line.split()[3])
    raise AssertionError(f"node {node} has no MemFree")


def run_alone(code: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    header = "import os, ctypes\nfrom cxl_offload.memory import *\n"
    command = [sys.executable, "-c", header + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("pages", ["base", "thp"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_pages_are_where_the_policy_says(policy: Policy, pages: str) -> None:
    granule = getattr(policy, "granule_bytes", 2 * MIB)
    if pages == "thp" and granule % (2 * MIB):
        with pytest.raises(ValueError, match="granule"):
            Memory.linux().allocate(SIZE, policy, pages="thp")
        return
    memory = Memory.linux()
    block = memory.allocate(SIZE, policy, pages=pages)  # type: ignore[arg-type]
    granted = block.bytes_per_node()
    assert sum(granted.values()) == SIZE
    for node, share in expected_shares(policy, SIZE).items():
        assert abs(granted.get(node, 0) - share) < granule
    sample = [node_of(block.address + at) for at in range(0, SIZE, 64 * KIB)]
    assert set(sample) <= set(granted)
    assert {node: sample.count(node) for node in granted if len(granted) == 1} in (
        {},
        {sample[0]: len(sample)},
    )


def test_small_granules_alternate_page_by_page() -> None:
    block = Memory.linux().allocate(MIB, Weighted({0: 2, FAR: 1}, granule_bytes=4 * KIB))
    found = [node_of(block.address + at) for at in range(0, 60 * KIB, 4 * KIB)]
    assert found == [0, 0, FAR] * 5


def test_mappings_do_not_grow_with_the_weights() -> None:
    def mappings(policy: Policy) -> int:
        block = Memory.linux().allocate(SIZE, policy)
        count = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            count += begin < block.address + SIZE and end > block.address
        return count

    simple = mappings(Bind((0,)))
    assert mappings(Weighted({0: 9, FAR: 7}, granule_bytes=4 * KIB)) == simple
    assert mappings(Interleave(tuple(NODES), granule_bytes=64 * KIB)) == simple


def test_khugepaged_leaves_stripes_alone() -> None:
    (KHUGEPAGED / "scan_sleep_millisecs").write_text("0")
    (KHUGEPAGED / "alloc_sleep_millisecs").write_text("0")
    (KHUGEPAGED / "pages_to_scan").write_text("65536")
    Path("/sys/kernel/mm/transparent_hugepage/enabled").write_text("always")
    memory = Memory.linux()
    policy = Weighted({0: 1, FAR: 1}, granule_bytes=64 * KIB)
    block = memory.allocate(16 * MIB, policy)
    before = [node_of(block.address + at) for at in range(0, 16 * MIB, 64 * KIB)]
    control = ctypes.CDLL(None)
    control.mmap.restype = ctypes.c_void_p
    plain = control.mmap(None, ctypes.c_size_t(16 * MIB), 3, 0x22, -1, 0)
    control.madvise(ctypes.c_void_p(plain), ctypes.c_size_t(16 * MIB), 15)  # no huge pages yet
    ctypes.memset(plain, 1, 16 * MIB)
    control.madvise(ctypes.c_void_p(plain), ctypes.c_size_t(16 * MIB), 14)
    collapsed = int((KHUGEPAGED / "pages_collapsed").read_text())
    deadline = time.monotonic() + 60
    while int((KHUGEPAGED / "pages_collapsed").read_text()) < collapsed + 4:
        assert time.monotonic() < deadline, "khugepaged never collapsed the control's pages"
        time.sleep(0.2)
    scans = int((KHUGEPAGED / "full_scans").read_text())
    while int((KHUGEPAGED / "full_scans").read_text()) < scans + 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    after = [node_of(block.address + at) for at in range(0, 16 * MIB, 64 * KIB)]
    assert after == before
    assert block.bytes_per_node() == {0: 8 * MIB, FAR: 8 * MIB}


def test_first_touch_is_the_toucher_s_node() -> None:
    cpu = next(node.cpus[0] for node in discover().nodes if node.id == 1 and node.cpus)
    done = run_alone(
        f"os.sched_setaffinity(0, {{{cpu}}})\n"
        f"m = Memory.linux(); b = m.allocate({MIB}, FirstTouch())\n"
        f"ctypes.memset(b.address, 1, {MIB}); print(b.bytes_per_node())"
    )
    assert done.stdout.strip() == str({1: MIB}), done.stderr


HOG = """
import re, sys
from cxl_offload.memory import Bind, Memory
node, leave, step = map(int, sys.argv[1:])
def free():
    text = open(f"/sys/devices/system/node/node{node}/meminfo").read()
    return int(re.search(r"MemFree: +([0-9]+)", text)[1]) << 10
memory, held = Memory.linux(), []
while free() > leave:
    try:
        held.append(memory.allocate(step, Bind((node,))))
    except MemoryError:
        break
print("full", flush=True)
sys.stdin.read()
"""


def test_node_filled_by_another_process_is_named_and_nothing_leaks() -> None:
    leave = 96 * MIB
    hog = subprocess.Popen(
        [sys.executable, "-c", HOG, str(FAR), str(leave), str(16 * MIB)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert hog.stdout is not None
        assert hog.stdout.readline().strip() == "full"
        memory = Memory.linux()
        before = free_kib(FAR)
        with pytest.raises(MemoryError, match=f"node {FAR} "):
            memory.allocate((free_kib(FAR) << 10) + 64 * MIB, Bind((FAR,)))
        assert memory.stats().mapped_bytes.current == 0
        assert abs(free_kib(FAR) - before) < 8 * 1024
        spilled = memory.allocate((before << 10) + 32 * MIB, Preferred((FAR, 0)))
        granted = spilled.bytes_per_node()
        assert granted.get(0, 0) > 0
        assert spilled.notes
        assert hog.poll() is None, "the process that filled the node was killed"
        del spilled
        memory.trim()
    finally:
        hog.communicate("")
    assert hog.returncode == 0


def test_copy_on_write_after_fork_leaves_the_parent_alone() -> None:
    block = Memory.linux().allocate(4 * MIB, Bind((FAR,)))
    ctypes.memset(block.address, 7, 4 * MIB)
    child = os.fork()
    if child == 0:
        ctypes.memset(block.address, 9, 4 * MIB)
        os._exit(0 if ctypes.string_at(block.address, 2) == b"\x09\x09" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ctypes.string_at(block.address, 4 * MIB) == b"\x07" * (4 * MIB)
    assert block.bytes_per_node() == {FAR: 4 * MIB}


def test_move_takes_live_memory_with_its_contents() -> None:
    memory = Memory.linux()
    block = memory.allocate(4 * MIB, Bind((0,)))
    ctypes.memset(block.address, 5, 4 * MIB)
    memory.move(block, Weighted({0: 1, FAR: 3}, granule_bytes=64 * KIB))
    assert block.bytes_per_node() == {0: MIB, FAR: 3 * MIB}
    memory.move(block, Bind((FAR,)))
    assert block.bytes_per_node() == {FAR: 4 * MIB}
    assert ctypes.string_at(block.address, 4 * MIB) == b"\x05" * (4 * MIB)


def test_huge_page_pool_empty_short_and_large_enough() -> None:
    pool = Path(f"/sys/devices/system/node/node{FAR}/hugepages/hugepages-2048kB/nr_hugepages")
    pool.write_text("0")
    memory = Memory.linux()
    with pytest.raises(MemoryError, match=f"node {FAR}"):
        memory.allocate(4 * MIB, Bind((FAR,)), pages="2MiB")
    pool.write_text("1")
    with pytest.raises(MemoryError, match=f"node {FAR}"):
        memory.allocate(4 * MIB, Bind((FAR,)), pages="2MiB")
    pool.write_text("3")
    block = memory.allocate(4 * MIB, Bind((FAR,)), pages="2MiB")
    assert block.bytes_per_node() == {FAR: 4 * MIB}
    assert memory.placement(block.address, 4 * MIB).page_bytes == 2 * MIB
    del block
    memory.trim()
    assert Path(pool.parent / "free_hugepages").read_text().strip() == "3"
    pool.write_text("0")


def test_nobody_needs_root() -> None:
    done = run_alone(
        "os.setgid(65534); os.setuid(65534)\n"
        f"b = Memory.linux().allocate({3 * MIB}, Weighted({{0: 2, {FAR}: 1}}, "
        f"granule_bytes={64 * KIB})); print(b.bytes_per_node())"
    )
    assert done.stdout.strip() == str({0: 2 * MIB, FAR: MIB}), done.stderr


def test_refused_mbind_says_what_to_grant() -> None:
    """A container's seccomp filter, here one that refuses mbind and set_mempolicy alone."""
    done = run_alone(
        "import struct\n"
        "libc = ctypes.CDLL(None)\n"
        "m = Memory.linux()\n"
        "def op(code, jt, jf, k): return struct.pack('HBBI', code, jt, jf, k)\n"
        "refused = (237, 238)\n"
        "text = op(0x20, 0, 0, 0)\n"
        "text += op(0x15, 1, 0, refused[0]) + op(0x15, 0, 1, refused[1])\n"
        "text += op(0x06, 0, 0, 0x00050001) + op(0x06, 0, 0, 0x7fff0000)\n"
        "code = ctypes.create_string_buffer(text)\n"
        "fields = [('n', ctypes.c_ushort), ('p', ctypes.c_void_p)]\n"
        "class Prog(ctypes.Structure): _fields_ = fields\n"
        "prog = Prog(5, ctypes.addressof(code))\n"
        "libc.prctl(38, 1, 0, 0, 0)\n"
        "assert libc.prctl(22, 2, ctypes.byref(prog), 0, 0) == 0\n"
        f"try: m.allocate({MIB}, Bind(({FAR},)))\n"
        "except OSError as e: print(e.errno, e, m.stats().mapped_bytes.current)"
    )
    assert done.stdout.startswith("1 "), done.stdout + done.stderr
    assert "seccomp" in done.stdout or "SYS_NICE" in done.stdout
    assert done.stdout.rstrip().endswith(" 0")


def test_topology_is_the_machine_s() -> None:
    found = discover()
    assert [node.id for node in found.nodes] == NODES
    for spec in SPEC.nodes:
        node = found.node(spec.id)
        assert len(node.cpus) == spec.cpus
        assert abs(node.capacity_bytes - spec.memory_bytes) < 0.25 * spec.memory_bytes
        assert node.kind.value == spec.kind
        tier = found.tier_of(spec.id)
        assert tier is not None
        assert tier.name == spec.tier
