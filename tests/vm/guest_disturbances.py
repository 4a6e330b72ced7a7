"""Inside a machine with three nodes: what the kernel does to memory behind a program's back."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload.memory import Bind, Interleave, Session, Weighted
from tests.placement.child import MIB, run_in_child, stranger_filling
from tests.placement.kernel_calls import (
    MPOL_DEFAULT,
    MPOL_PREFERRED,
    PAGE,
    anonymous,
    mappings_over,
    meminfo_bytes,
    oom_kills,
    page_nodes,
    populate,
    set_thread_policy,
)
from tests.placement.rig import HUGE, LinuxRig
from tests.placement.test_policies import expected_nodes
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
THP = Path("/sys/kernel/mm/transparent_hugepage")
KERNEL_WEIGHTS = Path("/sys/kernel/mm/mempolicy/weighted_interleave")
SMALL_STRIPE = 64 << 10
LAST = SPEC.node_ids[-1]


@pytest.fixture
def session() -> Iterator[Session]:
    session = LinuxRig(SPEC).session
    kills = oom_kills()
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert oom_kills() == kills


@contextlib.contextmanager
def _busy_khugepaged() -> Iterator[None]:
    wanted = {
        THP / "enabled": "always",
        THP / "khugepaged/scan_sleep_millisecs": "10",
        THP / "khugepaged/alloc_sleep_millisecs": "10",
        THP / "khugepaged/pages_to_scan": "65536",
    }
    before = {path: path.read_text() for path in wanted}
    for path, value in wanted.items():
        path.write_text(value)
    try:
        yield
    finally:
        for path, text in before.items():
            chosen = re.search(r"\[(\w+)\]", text)
            path.write_text(chosen[1] if chosen else text)


def _smaps_bytes(address: int, name: str) -> int:
    """One number of the mapping that holds ``address``."""
    sections = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    for section in sections[1:]:
        begin, end = (int(text, 16) for text in section.split()[0].split("-"))
        if begin <= address < end:
            found = re.search(rf"(?m)^{name}:\s+(\d+) kB", section)
            assert found
            return int(found[1]) << 10
    raise AssertionError(f"nothing is mapped at {address:#x}")


def _stripe_by_hand(address: int, nbytes: int, nodes: list[int]) -> None:
    for index, offset in enumerate(range(0, nbytes, SMALL_STRIPE)):
        set_thread_policy(MPOL_PREFERRED, [nodes[index % len(nodes)]])
        populate(address + offset, SMALL_STRIPE)
    set_thread_policy(MPOL_DEFAULT)


def test_khugepaged_leaves_small_granules_alone(session: Session) -> None:
    """It ran: stripes made by hand, without our advice, are destroyed meanwhile."""
    unprotected, address = anonymous(5 * HUGE)
    begin = -(-address // HUGE) * HUGE
    _stripe_by_hand(begin, 4 * HUGE, [0, 1])
    by_hand = page_nodes(begin, 4 * HUGE)
    assert set(by_hand) == {0, 1}
    policies = [
        Weighted({0: 4, 1: 2, LAST: 1}, granule_bytes=SMALL_STRIPE),
        Interleave((0, LAST), granule_bytes=PAGE),
    ]
    with _busy_khugepaged():
        blocks = [session.allocate(8 * HUGE, policy) for policy in policies]
        deadline = time.monotonic() + 60
        while page_nodes(begin, 4 * HUGE) == by_hand:
            assert time.monotonic() < deadline, "khugepaged never came by"
            time.sleep(0.5)
        time.sleep(2)
        for policy, block in zip(policies, blocks, strict=True):
            assert page_nodes(block.address, block.nbytes) == expected_nodes(policy, block.nbytes)
            assert mappings_over(block.address, block.nbytes) == 1
            assert _smaps_bytes(block.address, "AnonHugePages") == 0
    unprotected.madvise(mmap.MADV_DONTNEED)


def test_transparent_huge_pages_are_huge_and_striped(session: Session) -> None:
    policy = Weighted({0: 4, 1: 2, LAST: 1})
    block = session.allocate(14 * HUGE, policy, pages="thp")
    assert _smaps_bytes(block.address, "AnonHugePages") == 14 * HUGE
    assert page_nodes(block.address, 14 * HUGE) == expected_nodes(policy, 14 * HUGE)


@pytest.mark.parametrize("node", [node.id for node in SPEC.nodes if node.gigantic_pages])
def test_gigantic_page_comes_from_the_pool_of_its_node(session: Session, node: int) -> None:
    pool = Path(f"/sys/devices/system/node/node{node}/hugepages/hugepages-1048576kB")
    block = session.allocate((1 << 30) - 5, Bind((node,)), pages="1GiB")
    assert (block.held_bytes, block.page_bytes) == (1 << 30, 1 << 30)
    assert page_nodes(block.address, PAGE) == [node]
    assert page_nodes(block.address + (1 << 30) - PAGE, PAGE) == [node]
    assert (pool / "free_hugepages").read_text().strip() == "0"
    with pytest.raises(MemoryError, match=f"node {node}"):
        session.allocate(1 << 30, Bind((node,)), pages="1GiB")
    del block
    session.trim()
    assert (pool / "free_hugepages").read_text().strip() == "1"


def test_system_wide_weights_do_not_reach_our_stripes(session: Session) -> None:
    files = [KERNEL_WEIGHTS / f"node{node}" for node in SPEC.node_ids]
    before = [path.read_text() for path in files]
    for path, weight in zip(files, (1, 7, 3), strict=True):
        path.write_text(str(weight))
    try:
        policy = Weighted({0: 4, 1: 2, LAST: 1}, granule_bytes=SMALL_STRIPE)
        block = session.allocate(2 * MIB, policy)
        assert page_nodes(block.address, 2 * MIB) == expected_nodes(policy, 2 * MIB)
    finally:
        for path, text in zip(files, before, strict=True):
            path.write_text(text)


def test_page_cache_gives_way(session: Session) -> None:
    """A node that is full of cached files still takes what it has room for."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libraries = sorted(Path(spec.origin).parent.glob("lib/*.so"), key=lambda p: -p.stat().st_size)
    set_thread_policy(MPOL_PREFERRED, [LAST])
    with libraries[0].open("rb") as file:
        for _ in range(48):
            file.read(4 * MIB)
    set_thread_policy(MPOL_DEFAULT)
    cached = sum(meminfo_bytes(LAST, name) for name in ("Active(file)", "Inactive(file)"))
    assert cached > 128 * MIB
    nbytes = (meminfo_bytes(LAST, "MemFree") + cached // 3) // PAGE * PAGE
    block = session.allocate(nbytes, Bind((LAST,)))
    assert set(page_nodes(block.address, nbytes)) == {LAST}


def test_copies_on_write_stay_on_the_node(session: Session) -> None:
    block = session.allocate(8 * MIB, Bind((LAST,)))
    ctypes.memset(block.address, 1, block.nbytes)

    def child() -> None:
        ctypes.memset(block.address, 2, block.nbytes)
        assert set(page_nodes(block.address, block.nbytes)) == {LAST}

    run_in_child(child)
    ctypes.memset(block.address, 3, block.nbytes)
    assert set(page_nodes(block.address, block.nbytes)) == {LAST}


def test_copies_on_write_kill_nobody_when_the_node_is_full(session: Session) -> None:
    """The parent writes while a child still holds the pages; the copies go elsewhere."""
    # The kernel gives page cache back while we write: more is written than there can be of it.
    Path("/proc/sys/vm/drop_caches").write_text("1")
    nbytes = 128 * MIB
    block = session.allocate(nbytes, Bind((1,)))
    ctypes.memset(block.address, 0x11, nbytes)
    go_reader, go_writer = os.pipe()
    reader = os.fork()
    if reader == 0:
        os.read(go_reader, 1)
        same = ctypes.string_at(block.address, nbytes) == b"\x11" * nbytes
        os._exit(0 if same else 1)
    with stranger_filling(1, leave_bytes=0):
        ctypes.memset(block.address, 0x22, nbytes)
        nodes = page_nodes(block.address, nbytes)
    os.write(go_writer, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0, "the child saw our writes"
    assert set(nodes) - {1}, "the node was not full"
    granted = {node: nodes.count(node) * PAGE for node in set(nodes)}
    assert block.bytes_per_node() == granted, "the report is what the pages say"
    assert ctypes.string_at(block.address, nbytes) == b"\x22" * nbytes
