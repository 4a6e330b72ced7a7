"""Inside a machine with several nodes: NUMA balancing at full speed marks pages and moves them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload.memory import Bind, FirstTouch, Interleave, Pages, Session
from tests.placement.child import MIB
from tests.placement.kernel_calls import (
    MPOL_DEFAULT,
    MPOL_PREFERRED,
    PAGE,
    anonymous,
    page_nodes,
    populate,
    set_thread_policy,
)
from tests.placement.rig import LinuxRig
from tests.placement.test_policies import expected_nodes
from tests.vm.harness.machine import load

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
BALANCING = Path("/sys/kernel/debug/sched/numa_balancing")
BALANCING_ON = Path("/proc/sys/kernel/numa_balancing")
_ALLOCATING_S = 4.0
_MOST_WAITING_S = 240.0  # the kernel counts a task's own time, of which a busy host gives it little


@pytest.fixture
def session() -> Iterator[Session]:
    session = LinuxRig(SPEC).session
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0


@contextlib.contextmanager
def _busy_numa_balancing() -> Iterator[None]:
    wanted = {BALANCING / "scan_delay_ms": "0", BALANCING / "scan_period_min_ms": "50"}
    wanted |= {BALANCING / "scan_period_max_ms": "100", BALANCING_ON: "1"}
    if not BALANCING.exists():
        subprocess.run(["mount", "-t", "debugfs", "debugfs", "/sys/kernel/debug"], check=True)
    before = {path: path.read_text() for path in wanted}
    for path, value in wanted.items():
        path.write_text(value)
    try:
        yield
    finally:
        for path, text in before.items():
            path.write_text(text)


def test_numa_balancing_leaves_placed_pages_alone(session: Session) -> None:
    """It ran: pages without a policy follow the thread that uses them."""
    nbytes = 4 * MIB
    block = session.allocate(nbytes, Bind((1,)))
    unplaced, address = anonymous(nbytes)
    set_thread_policy(MPOL_PREFERRED, [1])
    populate(address, nbytes)
    set_thread_policy(MPOL_DEFAULT)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, SPEC.cpu_numbers(0))
    try:
        with _busy_numa_balancing():
            deadline = time.monotonic() + _MOST_WAITING_S
            while set(page_nodes(address, nbytes)) == {1}:
                assert time.monotonic() < deadline, "NUMA balancing never came by"
                for _ in range(20):
                    ctypes.memset(address, 1, nbytes)
                    ctypes.memset(block.address, 1, nbytes)
            for _ in range(40):
                ctypes.memset(block.address, 1, nbytes)
    finally:
        os.sched_setaffinity(0, allowed)
    assert set(page_nodes(block.address, nbytes)) == {1}
    unplaced.madvise(mmap.MADV_DONTNEED)


def _marked_pages() -> int:
    """How many the kernel has marked for a hint fault since it booted."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("numa_pte_updates "))


@pytest.mark.parametrize("pages", ["base", "thp"])
def test_pages_marked_while_they_are_placed_are_not_taken_for_absent(
    session: Session, pages: Pages
) -> None:
    """Linux 6.1 answers that marked pages are not there; a placed one must never stay marked."""
    policy = Interleave((0, SPEC.node_ids[-1]))
    nbytes = 16 * MIB
    expected = expected_nodes(policy, nbytes)
    with _busy_numa_balancing():
        enough = _marked_pages() + nbytes // PAGE
        began = time.monotonic()
        while (taken := time.monotonic() - began) < _ALLOCATING_S or _marked_pages() <= enough:
            assert taken < _MOST_WAITING_S, "NUMA balancing never came by"
            block = session.allocate(nbytes, policy, pages=pages)
            for _ in range(3):
                assert page_nodes(block.address, nbytes) == expected
            session.move(block, Bind((1,)))
            assert block.bytes_per_node() == {1: nbytes}
            del block


def test_memory_of_first_touch_is_seen_where_it_is(session: Session) -> None:
    nbytes = 8 * MIB
    block = session.allocate(nbytes, FirstTouch())
    with _busy_numa_balancing():
        ctypes.memset(block.address, 1, nbytes)
        places = page_nodes(block.address, nbytes)
        assert min(places) >= 0
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            assert page_nodes(block.address, nbytes) == places
