"""The contract of a session, on this machine's kernel and on a simulated one."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cxl_offload import _C
from cxl_offload.memory import (
    Bind,
    FirstTouch,
    Interleave,
    Preferred,
    Session,
    Weighted,
    current_session,
    use,
)
from cxl_offload.topology import load_machine

from ..placement.child import run_in_child
from .machines import GIB, KIB, MIB, simulated_memory
from .pages import PAGE, mappings_over, nodes_of, resident_bytes


def test_bind_places_every_page_and_reports_it(session: Session) -> None:
    block = session.allocate(10 * MIB + 1, Bind((0,)))
    assert block.bytes_per_node() == {0: 10 * MIB + 1}
    assert block.held_bytes == -(-block.nbytes // PAGE) * PAGE
    placement = session.placement(block.address, block.nbytes)
    assert placement.requested == "bind to nodes {0}"
    assert placement.granted == {0: block.nbytes}
    assert placement.simulated == session.is_simulated
    assert not placement.notes


def test_bind_agrees_with_the_kernel_s_own_answer() -> None:
    session = Session.linux()
    block = session.allocate(3 * MIB, Bind((0,)))
    assert nodes_of(block.address, block.nbytes) == {0: 3 * MIB // PAGE}
    assert mappings_over(block.address, block.nbytes) == 1


def test_memory_is_returned_when_the_last_owner_drops_it() -> None:
    session = Session.linux()
    before = resident_bytes()
    block = session.allocate(64 * MIB, Bind((0,)))
    assert resident_bytes() - before > 60 * MIB
    del block
    assert session.stats().asked_bytes.current == 0
    assert session.trim() >= 64 * MIB
    assert resident_bytes() - before < 4 * MIB
    assert session.stats().nodes[0].current_bytes == 0


def test_pages_of_first_touch_are_there_only_when_touched(session: Session) -> None:
    import ctypes

    block = session.allocate(4 * MIB, FirstTouch())
    assert block.bytes_per_node() == {-1: 4 * MIB}
    ctypes.memset(block.address, 7, 2 * MIB)
    granted = block.bytes_per_node()
    assert granted.pop(-1) == 2 * MIB
    assert sum(granted.values()) == 2 * MIB


SHARES = st.dictionaries(st.integers(0, 2), st.integers(1, 9), min_size=2, max_size=3)


@settings(deadline=None, max_examples=60)
@given(SHARES, st.integers(1, 300), st.sampled_from([4 * KIB, 64 * KIB]))
@example({0: 2, 1: 1, 2: 1}, 6, 4 * KIB)
def test_weighted_interleave_has_exact_shares_of_granules(
    weights: dict[int, int], granules: int, granule_bytes: int
) -> None:
    session = simulated_memory()
    nbytes = granules * granule_bytes
    block = session.allocate(nbytes, Weighted(weights, granule_bytes=granule_bytes))
    total = sum(weights.values())
    granted = block.bytes_per_node()
    assert sum(granted.values()) == nbytes
    smallest = total // _gcd(weights.values())
    if granules < smallest:
        heaviest = max(weights, key=lambda node: weights[node])
        assert granted == {heaviest: nbytes}
        assert "less than one cycle" in block.notes[0]
        return
    for node, weight in weights.items():
        ideal = Fraction(granules * weight, total)
        assert abs(Fraction(granted.get(node, 0), granule_bytes) - ideal) < 1


def _gcd(values: object) -> int:
    from math import gcd

    return gcd(*values)  # type: ignore[misc]


def test_stripe_is_one_mapping_whatever_the_weights() -> None:
    session = Session.linux()
    granule = 64 * KIB
    block = session.allocate(8 * MIB, Interleave((0,), granule_bytes=granule))
    assert mappings_over(block.address, block.nbytes) == 1
    runs = _C.stripe_runs([(0, 4), (1, 2), (2, 1)], granule, 7 * granule)
    assert runs == [(0, 4 * granule, 0), (4 * granule, 2 * granule, 1), (6 * granule, granule, 2)]


def test_strict_interleave_is_refused_when_a_node_is_full(three_nodes: Session) -> None:
    with pytest.raises(MemoryError, match=r"node 2 .* free .*lower its weight"):
        three_nodes.allocate(12 * GIB, Weighted({0: 1, 2: 1}))
    assert three_nodes.stats().mapped_bytes.current == 0
    assert three_nodes.stats().nodes.get(2) is None or (
        three_nodes.stats().nodes[2].current_bytes == 0
    )
    assert three_nodes.allocate(1 * GIB, Bind((2,))).bytes_per_node() == {2: 1 * GIB}


def test_lenient_interleave_spills_and_says_so(three_nodes: Session) -> None:
    block = three_nodes.allocate(12 * GIB, Weighted({0: 1, 2: 1}), strict=False)
    granted = block.bytes_per_node()
    assert sum(granted.values()) == 12 * GIB
    assert granted[0] > 6 * GIB
    assert any("full" in note for note in block.notes)


def test_preferred_fills_in_order_and_reports_the_spill(three_nodes: Session) -> None:
    block = three_nodes.allocate(10 * GIB, Preferred((2,)))
    granted = block.bytes_per_node()
    assert 3 * GIB < granted[2] < 4 * GIB
    assert granted[0] == 10 * GIB - granted[2], "node 0 is nearer to node 2 than node 1"
    assert any("spilled to node 0" in note for note in block.notes)


def test_bind_over_two_nodes_fills_in_order(three_nodes: Session) -> None:
    block = three_nodes.allocate(10 * GIB, Bind((0, 2)))
    granted = block.bytes_per_node()
    assert granted.keys() == {0, 2}
    assert granted[0] > 7 * GIB
    with pytest.raises(MemoryError, match=r"node 0 .*node 2"):
        three_nodes.allocate(4 * GIB, Bind((0, 2)))


def test_capacity_set_by_the_user_is_kept() -> None:
    session = Session.linux(limits={0: 8 * MIB})
    block = session.allocate(6 * MIB, Bind((0,)))
    with pytest.raises(MemoryError, match=r"node 0 has .* of its set capacity left"):
        session.allocate(4 * MIB, Bind((0,)))
    assert session.stats().nodes[0].capacity_bytes == 8 * MIB
    del block
    assert session.allocate(8 * MIB, Bind((0,))).nbytes == 8 * MIB


def test_more_than_the_machine_has_is_refused_before_anything_is_touched() -> None:
    session = Session.linux()
    before = resident_bytes()
    with pytest.raises(MemoryError, match="free"):
        session.allocate(1 << 45, Bind((0,)))
    assert resident_bytes() - before < 4 * MIB
    assert session.stats().mapped_bytes.current == 0


@pytest.mark.parametrize("node", [63, 1023])
def test_unknown_node_is_refused(session: Session, node: int) -> None:
    with pytest.raises(ValueError, match=f"node {node} has no memory"):
        session.allocate(MIB, Bind((node,)))


def test_granule_must_be_whole_pages(session: Session) -> None:
    with pytest.raises(ValueError, match="a granule of 5000 bytes; give a multiple of a page"):
        Interleave((0,), granule_bytes=5000)
    with pytest.raises(ValueError, match="no multiple of the"):
        session.allocate(8 * MIB, Interleave((0,), granule_bytes=64 * KIB), pages="thp")


def test_sizes_and_pages_that_mean_nothing_are_refused(session: Session) -> None:
    with pytest.raises(ValueError, match="0 bytes"):
        session.allocate(0, Bind((0,)))
    with pytest.raises(ValueError, match="pages"):
        session.allocate(1, Bind((0,)), pages="3MiB")  # type: ignore[arg-type]


def test_move_keeps_address_and_contents(three_nodes: Session) -> None:
    import ctypes

    block = three_nodes.allocate(4 * MIB, Bind((0,)))
    ctypes.memset(block.address, 0x5A, block.nbytes)
    address = block.address
    three_nodes.move(block, Weighted({1: 1, 2: 3}, granule_bytes=64 * KIB))
    assert block.address == address
    assert block.bytes_per_node() == {1: MIB, 2: 3 * MIB}
    assert ctypes.string_at(address, 64) == b"\x5a" * 64
    assert "1:3" in block.requested
    used = three_nodes.stats().nodes
    assert used[0].current_bytes == 0
    assert used[2].current_bytes == 3 * MIB


def test_moved_block_is_not_reused_under_its_old_policy(three_nodes: Session) -> None:
    block = three_nodes.allocate(4 * MIB, Bind((0,)))
    three_nodes.move(block, Bind((2,)))
    del block
    again = three_nodes.allocate(4 * MIB, Bind((0,)))
    assert again.bytes_per_node() == {0: 4 * MIB}


def test_move_to_a_full_node_leaves_everything_in_place(three_nodes: Session) -> None:
    hog = three_nodes.allocate(3800 * MIB, Bind((2,)))
    block = three_nodes.allocate(1 * GIB, Bind((0,)))
    with pytest.raises(MemoryError, match="node 2"):
        three_nodes.move(block, Bind((2,)))
    assert block.bytes_per_node() == {0: GIB}
    assert hog.bytes_per_node() == {2: 3800 * MIB}


def test_move_of_less_than_a_page_is_refused(session: Session) -> None:
    small = session.allocate(100, Bind((0,)))
    other = session.allocate(100, Bind((0,)))
    assert small.address // PAGE == other.address // PAGE
    with pytest.raises(ValueError, match="smaller than a page"):
        session.move(small, Bind((0,)))


def test_pages_or_more_own_whole_pages(session: Session) -> None:
    blocks = [session.allocate(size, Bind((0,))) for size in (PAGE, 100, PAGE + 1, 3 * PAGE, 64)]
    owners: dict[int, int] = {}
    for block in blocks:
        for page in range(block.address // PAGE, -(-(block.address + block.nbytes) // PAGE)):
            if block.nbytes >= PAGE:
                assert page not in owners
            owners[page] = owners.get(page, 0) + 1
        assert block.address % (PAGE if block.nbytes >= PAGE else 64) == 0


def test_transparent_huge_pages_belong_to_one_block(session: Session) -> None:
    """They move as one, so none is shared; what is smaller has base pages."""
    huge = 2 * MIB
    session.allocate(
        16 * MIB, Bind((0,)), pages="thp"
    )  # dropped at once, and cut up by what follows
    blocks = [
        session.allocate(size, Bind((0,)), pages="thp") for size in (huge + 1, PAGE + 1, huge, 64)
    ]
    assert [block.held_bytes for block in blocks] == [2 * huge, 2 * PAGE, huge, 64]
    taken: set[int] = set()
    for block in blocks:
        first = block.address // huge
        of_block = set(range(first, (block.address + block.held_bytes - 1) // huge + 1))
        if block.nbytes >= huge:
            assert block.address % huge == 0
            assert not of_block & taken
            taken |= of_block
        else:
            assert not of_block & taken


@pytest.mark.parametrize("finished_before", [True, False])
def test_pinned_memory_is_reused_only_after_its_events(finished_before: bool) -> None:
    driver = _C.FakeDriver()
    session = Session.linux(driver=driver)
    block = session.allocate(4 * MIB, Bind((0,)), pin=True)
    assert block.pinned
    assert driver.registered_bytes == 4 * MIB
    driver.launch(7)
    block.record_stream(7)
    address = block.address
    del block
    if finished_before:
        driver.finish(7)
    again = session.allocate(4 * MIB, Bind((0,)), pin=True)
    assert again.address == address
    assert driver.event_waits == (0 if finished_before else 1), "stream 7 was still reading it"
    assert driver.synchronizations == 0
    del again
    session.trim()
    assert driver.registered_bytes == 0


def test_pinned_memory_of_unknown_streams_waits_for_the_whole_context() -> None:
    driver = _C.FakeDriver()
    session = Session.linux(driver=driver)
    address = session.allocate(4 * MIB, Bind((0,)), pin=True).address
    assert driver.synchronizations == 0
    assert session.allocate(4 * MIB, Bind((0,)), pin=True).address == address
    assert driver.synchronizations == 1


def test_refused_registration_leaves_nothing_behind() -> None:
    driver = _C.FakeDriver()
    session = Session.linux(driver=driver)
    driver.fail_registration(1)
    with pytest.raises(OSError):  # noqa: PT011  the errno is the driver's
        session.allocate(4 * MIB, Bind((0,)), pin=True)
    assert session.stats().mapped_bytes.current == 0
    assert session.stats().nodes[0].current_bytes == 0
    assert session.allocate(4 * MIB, Bind((0,)), pin=True).pinned


def test_pinning_without_a_driver_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="pin=False"):
        Session.linux().allocate(4 * MIB, Bind((0,)), pin=True)


@pytest.mark.timeout(600)
def test_four_threads_leak_nothing(session: Session) -> None:
    """Sizes from bytes to a few pages, some held for a while."""
    rounds = 8_000
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        import random

        rng = random.Random(seed)
        held: list[object] = []
        try:
            for _ in range(rounds):
                if len(held) > 64:
                    del held[rng.randrange(len(held))]
                size = int(2 ** rng.uniform(0, 15))
                held.append(session.allocate(size, Bind((0,))))
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gc.collect()
    stats = session.stats()
    assert stats.allocations.total >= 4 * rounds
    assert stats.asked_bytes.current == 0
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert session.stats().nodes[0].current_bytes == 0


def test_forked_child_reads_and_leaves_the_pool_alone() -> None:
    import ctypes

    session = Session.linux()
    block = session.allocate(4 * MIB, Bind((0,)))
    ctypes.memset(block.address, 42, block.nbytes)
    child = os.fork()
    if child == 0:
        ok = ctypes.string_at(block.address, 16) == b"\x2a" * 16
        ctypes.memset(block.address, 1, block.nbytes)
        del block
        gc.collect()
        try:
            session.allocate(MIB, Bind((0,)))
        except ValueError:
            os._exit(0 if ok else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ctypes.string_at(block.address, 16) == b"\x2a" * 16
    assert session.allocate(4 * MIB, Bind((0,))).address != block.address


def test_child_that_was_forked_within_use_leaves_its_block() -> None:
    """No session is in use in it, and an error of its own is not hidden by another."""
    with use(Session.simulated(load_machine("epyc9354-cxl-a"))) as session:
        block = use(session)
        block.__enter__()
        run_in_child(lambda: block.__exit__(None, None, None))
        assert current_session() is session
        block.__exit__(None, None, None)


def test_allocations_may_outlive_the_interpreter_s_last_breath() -> None:
    script = (
        "from cxl_offload.memory import Session, Bind\n"
        "import threading, builtins\n"
        "session = Session.linux()\n"
        "builtins.kept = [session.allocate(1 << 20, Bind((0,))) for _ in range(8)]\n"
        "threading.Thread(target=lambda: session.allocate(5, Bind((0,)))).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
