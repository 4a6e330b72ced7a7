"""Nothing is left after 10^5 allocations from four threads, on simulated nodes and on this kernel.

What is left is asked of the kernel, not of the pools: the simulated one has exact counters, and of
the real one resident bytes and mappings are read from /proc.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable

import pytest

from cxl_offload import _C
from cxl_offload.memory import Bind, FirstTouch, Interleave, Policy, Preferred, Session

from .ground import GIB, KIB, MIB, Account, check_all_returned, simulated

ALLOCATIONS = 100_000
THREADS = 4
HELD = 40


def policies_of(session: Session) -> list[Policy]:
    if session.is_simulated:
        return [
            Bind((1,)),
            Preferred((2, 0)),
            Interleave((0, 1, 2), granule_bytes=4 * KIB),
            FirstTouch(),
        ]
    return [Bind((0,)), Preferred((0,)), Interleave((0,), granule_bytes=64 * KIB), FirstTouch()]


def churn(session: Session, seed: int, count: int) -> None:
    """Allocations of bytes to a few pages; some live long, some move, some are read."""
    rng = random.Random(seed)
    policies = policies_of(session)
    held: list[_C.Allocation] = []
    for turn in range(count):
        if len(held) > HELD:
            del held[rng.randrange(len(held))]
        size = int(2 ** rng.uniform(0, 16))
        held.append(session.allocate(size, policies[turn % len(policies)]))
        if turn % 64 == 0 and held[0].held_bytes >= 4 * KIB:
            session.move(held[0], policies[0])
        if turn % 4096 == 0:
            session.trim()


def in_threads(work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:  # reported by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.timeout(600)
def test_simulated_nodes_get_every_page_back() -> None:
    session = simulated(GIB)
    in_threads(lambda seed: churn(session, seed, ALLOCATIONS // THREADS))
    assert session.stats().allocations.total == ALLOCATIONS
    check_all_returned(session)


def resident_and_mappings() -> tuple[int, int]:
    with open("/proc/self/statm") as text:
        resident = int(text.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as lines:
        return resident, sum(1 for _ in lines)


@pytest.mark.slow(reason="allocates and frees in many threads for seconds")
@pytest.mark.timeout(600)
def test_this_kernel_gets_every_page_back() -> None:
    session = Session.linux()
    in_threads(lambda seed: churn(session, seed, 1000))  # so that arenas and stacks are there
    session.trim()
    gc.collect()
    resident, mappings = resident_and_mappings()
    before = session.stats().allocations.total
    in_threads(lambda seed: churn(session, seed, ALLOCATIONS // THREADS))
    assert session.stats().allocations.total - before == ALLOCATIONS
    session.trim()
    gc.collect()
    stats = session.stats()
    assert Account.of(session) == Account(0, 0, 0)
    assert stats.mapped_bytes.current == 0
    assert all(use.current_bytes == 0 for use in stats.nodes.values())
    now = resident_and_mappings()
    # One page kept of each 10^3 allocations would be 400 KiB; malloc's own arenas move by less.
    assert now[0] - resident < 4 * MIB
    assert now[1] - mappings < 40
    assert stats.held_bytes.total > 600 * MIB


def test_a_thousand_policies_leave_no_more_than_one() -> None:
    session = simulated(GIB)
    with open("/proc/self/maps") as lines:
        before = sum(1 for _ in lines)
    for granule in range(1, 1001):
        session.allocate(64 * KIB, Interleave((0, 1), granule_bytes=granule * 4 * KIB))
    session.trim()
    with open("/proc/self/maps") as lines:
        assert sum(1 for _ in lines) - before < 20
    assert session.stats().allocations.total == 1000
    check_all_returned(session)
