"""What one pool caches never makes a request fail that fits without it."""

from __future__ import annotations

import threading

import pytest

from cxl_offload import _C
from cxl_offload.memory import (
    Bind,
    FirstTouch,
    Interleave,
    Pages,
    Policy,
    Preferred,
    Session,
    Weighted,
)

from .ground import (
    GIB,
    MIB,
    check_against_kernel,
    check_all_returned,
    has_stamp,
    kernel_of,
    simulated,
    stamp,
)

FILLERS: list[tuple[str, Policy, Pages]] = [
    ("thp", Bind((2,)), "thp"),
    ("order", Bind((2, 0)), "base"),
    ("preferred", Preferred((2,)), "base"),
    ("interleave", Interleave((0, 2)), "base"),
    ("weighted", Weighted({2: 7, 1: 1}), "base"),
]


@pytest.mark.parametrize(("policy", "pages"), [f[1:] for f in FILLERS], ids=[f[0] for f in FILLERS])
def test_a_fitting_request_succeeds_though_another_pool_caches_the_node(
    policy: Policy, pages: Pages
) -> None:
    session = simulated(256 * MIB)
    size = 400 * MIB if isinstance(policy, Interleave) else 230 * MIB
    session.allocate(size, policy, pages=pages)
    assert session.stats().cached_bytes.current == size
    block = session.allocate(230 * MIB, Bind((2,)))
    assert block.bytes_per_node() == {2: 230 * MIB}
    check_against_kernel(session, [block])


def test_a_fitting_request_succeeds_though_many_pools_cache_a_little() -> None:
    session = simulated(256 * MIB)
    for weight in range(1, 9):
        session.allocate(24 * MIB, Weighted({0: weight, 2: 16}, granule_bytes=64 << 10))
    block = session.allocate(230 * MIB, Bind((2,)))
    assert block.bytes_per_node() == {2: 230 * MIB}


def test_live_memory_of_another_pool_is_left_alone() -> None:
    session = simulated(256 * MIB)
    live = session.allocate(100 * MIB, Bind((2,)), pages="thp")
    with pytest.raises(MemoryError, match="node 2 has"):
        session.allocate(230 * MIB, Bind((2,)))
    assert live.bytes_per_node() == {2: 100 * MIB}
    check_against_kernel(session, [live])


def test_a_set_capacity_is_not_used_up_by_what_another_pool_caches() -> None:
    session = simulated(GIB, limits={1: 64 * MIB})
    session.allocate(60 * MIB, Bind((1,)), pages="thp")
    assert session.allocate(60 * MIB, Bind((1,))).bytes_per_node() == {1: 60 * MIB}
    assert session.stats().nodes[1].peak_bytes <= 64 * MIB


def test_memory_that_the_process_may_hold_is_not_used_up_by_a_cache() -> None:
    session = Session.simulated(simulated(GIB).machine, process_limit_bytes=200 * MIB)
    session.allocate(150 * MIB, Bind((0,)))
    assert session.allocate(150 * MIB, Bind((1,))).bytes_per_node() == {1: 150 * MIB}


def test_the_driver_s_limit_is_not_used_up_by_what_another_pool_has_registered() -> None:
    session = simulated(GIB, driver=_C.FakeDriver(limit_bytes=100 * MIB))
    session.allocate(80 * MIB, Bind((0,)), pin=True)
    block = session.allocate(80 * MIB, Bind((1,)), pin=True)
    assert block.pinned
    assert block.bytes_per_node() == {1: 80 * MIB}


def test_a_broken_context_does_not_hide_what_is_wrong() -> None:
    driver = _C.FakeDriver()
    session = simulated(256 * MIB, driver=driver)
    pinned = session.allocate(200 * MIB, Bind((2,)), pin=True)
    driver.break_context()
    del pinned
    with pytest.raises(MemoryError, match="node 2"):
        session.allocate(200 * MIB, Bind((2,)))


def test_a_move_succeeds_though_a_pool_caches_the_target() -> None:
    session = simulated(256 * MIB)
    block = session.allocate(200 * MIB, Bind((0,)))
    session.allocate(200 * MIB, Bind((2,)))
    session.move(block, Bind((2,)))
    assert block.bytes_per_node() == {2: 200 * MIB}
    check_against_kernel(session, [block])
    del block
    check_all_returned(session)


def test_a_move_counts_the_room_that_its_own_pages_leave() -> None:
    session = simulated(256 * MIB, limits={0: 220 * MIB, 1: 120 * MIB})
    block = session.allocate(220 * MIB, Bind((0,)))
    kernel_of(session).set_used_by_others(0, 256 * MIB - 220 * MIB)
    session.move(block, Interleave((0, 1)))
    assert block.bytes_per_node() == {0: 110 * MIB, 1: 110 * MIB}
    session.move(block, Weighted({0: 10, 1: 1}))
    assert block.bytes_per_node() == {0: 200 * MIB, 1: 20 * MIB}
    check_against_kernel(session, [block])
    assert session.stats().nodes[0].peak_bytes == 220 * MIB
    assert session.stats().nodes[1].peak_bytes == 110 * MIB
    assert session.stats().nodes[0].total_bytes == (220 + 90) * MIB


def test_pages_never_touched_come_in_where_they_are_moved_to() -> None:
    session = simulated(256 * MIB)
    touched = session.allocate(64 * MIB, Bind((0,)))
    stamp(touched, 1)
    fresh = session.allocate(64 * MIB, FirstTouch())
    stamp(fresh, 2)
    absent = fresh.bytes_per_node()[-1]
    assert absent > 60 * MIB
    session.move(fresh, Bind((2,)))
    assert fresh.bytes_per_node() == {2: 64 * MIB}
    assert has_stamp(fresh, 2)
    check_against_kernel(session, [touched, fresh])


def test_a_spill_of_a_move_is_told() -> None:
    session = simulated(256 * MIB)
    hog = session.allocate(200 * MIB, Bind((2,)))
    block = session.allocate(100 * MIB, Bind((1,)))
    session.move(block, Preferred((2,)))
    granted = block.bytes_per_node()
    assert granted.keys() == {0, 2}, "node 0 is nearer to node 2 than node 1"
    assert any("spilled to node 0" in note for note in block.notes)
    check_against_kernel(session, [hog, block])


def test_of_two_threads_that_each_need_all_of_a_node_one_always_gets_it() -> None:
    session = simulated(256 * MIB)
    rules: list[Pages] = ["base", "thp"]
    rounds = 200
    served: list[int] = []
    refused: list[int] = []
    barrier = threading.Barrier(2)

    def work(pages: Pages) -> None:
        for turn in range(rounds):
            barrier.wait()
            try:
                block = session.allocate(200 * MIB, Bind((2,)), pages=pages)
            except MemoryError:
                refused.append(turn)
                block = None
            barrier.wait()
            served.extend([turn] * (block is not None))
            del block

    threads = [threading.Thread(target=work, args=(pages,)) for pages in rules]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(served) == list(range(rounds))
    assert sorted(refused) == list(range(rounds))
    check_all_returned(session)


def test_threads_that_move_one_block_take_turns() -> None:
    session = simulated(256 * MIB)
    blocks = [session.allocate(96 * MIB, Bind((0,)))]
    targets: list[Policy] = [Bind((1,)), Bind((2,)), Interleave((0, 1)), Weighted({0: 1, 2: 3})]

    def work(target: Policy) -> None:
        for _ in range(30):
            session.move(blocks[0], target)

    threads = [threading.Thread(target=work, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_against_kernel(session, blocks)
    blocks.clear()
    check_all_returned(session)
