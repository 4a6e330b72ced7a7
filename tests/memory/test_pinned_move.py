"""Moving memory that is pinned and live: quiesced, unpinned, moved, pinned again, looked at again.

The driver and the nodes are simulated. The simulated kernel does not move a pinned page, so every
page that arrived was unpinned first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno

import pytest
import torch

import cxl_offload
from cxl_offload import _C
from cxl_offload.errors import PlacementError
from cxl_offload.memory import Bind, Interleave, Session, Weighted
from cxl_offload.topology import Machine

from .machines import GIB, KIB, MIB, simulated_machine
from .test_pinned import CXL, MOVABLE, NORMAL, assert_empty, kernel_of, memory_on

SIZE = 8 * MIB
PATTERN = bytes(range(256)) * (SIZE // 256)


def written(session: Session, node: int = 0) -> _C.Allocation:
    block = session.allocate(SIZE, Bind((node,)), pin=True)
    ctypes.memmove(block.address, PATTERN, SIZE)
    return block


def contents(block: _C.Allocation) -> bytes:
    return ctypes.string_at(block.address, block.nbytes)


def assert_consistent(session: Session, driver: _C.FakeDriver, block: _C.Allocation) -> None:
    """Whatever a move did, the block is whole, pinned or not, and counted where its pages are."""
    assert contents(block) == PATTERN
    granted = block.bytes_per_node()
    assert sum(granted.values()) == SIZE
    held = {node: use.current_bytes for node, use in session.stats().nodes.items()}
    assert {node: count for node, count in held.items() if count} == granted
    assert driver.registered_bytes == (SIZE if block.pinned else 0)
    assert session.placement(block.address, SIZE).pinned == block.pinned
    assert block.pinned or any("not pinned" in note for note in block.notes)
    assert driver.events == 0
    assert driver.wrong_unregisters == 0


def test_move_keeps_address_contents_and_pin() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    address = block.address
    session.move(block, Weighted({1: 3, CXL: 1}))
    assert block.address == address
    assert block.bytes_per_node() == {1: 6 * MIB, CXL: 2 * MIB}
    assert block.pinned
    assert block.requested.startswith("interleave 3:1")
    assert not block.notes
    assert driver.registrations == 2
    assert_consistent(session, driver, block)
    session.move(block, Bind((0,)))
    assert block.bytes_per_node() == {0: SIZE}
    del block
    assert_empty(session, driver)


def test_move_waits_for_the_streams_that_used_it_and_no_others() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    for stream in (7, 9):
        driver.launch(stream)
        block.record_stream(stream)
    session.move(block, Bind((CXL,)))
    assert driver.event_waits == 2
    assert driver.synchronizations == 0
    assert_consistent(session, driver, block)


def test_move_waits_for_all_work_when_no_stream_was_named() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    driver.launch(7)
    session.move(block, Bind((CXL,)))
    assert driver.synchronizations == 1
    assert_consistent(session, driver, block)


def test_move_is_refused_while_it_cannot_be_quiesced() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    block.record_stream(7)
    driver.break_context()
    with pytest.raises(OSError, match="broken"):
        session.move(block, Bind((CXL,)))
    assert block.pinned
    assert block.bytes_per_node() == {0: SIZE}
    assert_consistent(session, driver, block)


def test_moved_pinned_memory_is_not_used_again_under_its_old_policy() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    session.move(block, Bind((CXL,)))
    del block
    again = session.allocate(SIZE, Bind((0,)), pin=True)
    assert again.bytes_per_node() == {0: SIZE}
    del again
    assert_empty(session, driver)


def test_refused_registration_leaves_the_memory_moved_and_not_pinned() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    driver.fail_registration(1)
    with pytest.raises(PlacementError, match=r"on their new nodes and not pinned any more"):
        session.move(block, Bind((CXL,)))
    assert not block.pinned
    assert block.bytes_per_node() == {CXL: SIZE}
    assert block.requested == "bind to nodes {2}"
    assert_consistent(session, driver, block)
    session.move(block, Bind((1,)))  # pins it again
    assert block.pinned
    assert block.bytes_per_node() == {1: SIZE}
    assert not block.notes
    assert_consistent(session, driver, block)
    del block
    assert_empty(session, driver)


def test_memory_left_unpinned_by_a_move_is_returned_without_unregistering() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    driver.fail_registration(1)
    with pytest.raises(PlacementError):
        session.move(block, Bind((CXL,)))
    del block
    assert_empty(session, driver)


def test_move_to_a_full_node_puts_it_back_and_pins_it_again() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    kernel_of(session).set_used_by_others(CXL, 4 * GIB)
    with pytest.raises(MemoryError, match="node 2"):
        session.move(block, Bind((CXL,)))
    assert block.pinned
    assert block.bytes_per_node() == {0: SIZE}
    assert block.requested == "bind to nodes {0}"
    assert_consistent(session, driver, block)


def test_move_that_fails_twice_says_so_and_leaves_it_valid() -> None:
    session, driver = memory_on(NORMAL)
    block = written(session)
    kernel_of(session).fail("move", code=errno.EIO)
    driver.fail_registration(1)
    with pytest.raises(PlacementError, match=r"could not be pinned again"):
        session.move(block, Bind((CXL,)))
    assert not block.pinned
    assert block.bytes_per_node() == {0: SIZE}
    assert block.requested == "bind to nodes {0}"
    assert_consistent(session, driver, block)


def test_strict_move_to_a_movable_node_goes_back_to_where_it_was() -> None:
    session, driver = memory_on(MOVABLE)
    block = written(session, 1)
    with pytest.raises(PlacementError, match=r"left node 2 .*ZONE_MOVABLE.*back where it was"):
        session.move(block, Bind((CXL,)))
    assert block.pinned
    assert block.bytes_per_node() == {1: SIZE}
    assert block.requested == "bind to nodes {1}"
    assert not block.notes
    assert_consistent(session, driver, block)


def test_strict_move_that_cannot_go_back_says_where_it_is() -> None:
    session, driver = memory_on(MOVABLE)
    block = written(session, 1)
    driver.fail_registration(2)
    with pytest.raises(PlacementError, match=r"left node 2 .*not pinned since"):
        session.move(block, Bind((CXL,)))
    assert not block.pinned
    assert block.bytes_per_node() == {1: SIZE}
    assert_consistent(session, driver, block)


def test_lenient_move_to_a_movable_node_is_reported() -> None:
    session, driver = memory_on(MOVABLE)
    block = written(session, 1)
    session.move(block, Bind((CXL,)), strict=False)
    assert block.pinned
    assert block.bytes_per_node() == {0: SIZE}, "node 0 is nearest to node 2"
    assert any("8 MiB left node 2 for node 0" in note for note in block.notes)
    assert_consistent(session, driver, block)


OPERATIONS = ["set_policy", "query", "move"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("machine", [NORMAL, MOVABLE], ids=["normal", "movable"])
def test_move_survives_a_fault_at_every_call(operation: str, machine: Machine) -> None:
    """Each call that a move makes fails once, in turn; the fault-free move counts them."""
    target = Weighted({1: 1, CXL: 1})
    session, driver = memory_on(machine)
    block = written(session)
    before = kernel_of(session).calls[operation]
    session.move(block, target, strict=False)
    calls = kernel_of(session).calls[operation] - before
    assert calls > 0
    for call in range(1, calls + 1):
        for code in (errno.ENOMEM, errno.EIO):
            session, driver = memory_on(machine)
            block = written(session)
            kernel_of(session).fail(operation, call=call, code=code)
            with contextlib.suppress(MemoryError, OSError, PlacementError):
                session.move(block, target, strict=False)
            assert kernel_of(session).faults_fired == 1
            kernel_of(session).clear_faults()
            assert_consistent(session, driver, block)
            session.move(block, Bind((0,)))
            assert block.pinned
            assert_consistent(session, driver, block)
            del block
            assert_empty(session, driver)


def test_nothing_is_held_twice() -> None:
    """A move within a memory limit that has no room for a second copy, in bounded calls."""
    machine = NORMAL
    kernel = Session.simulated(machine, process_limit_bytes=3 * GIB + 32 * MIB).kernel
    assert isinstance(kernel, _C.SimulatedKernel)
    driver = _C.FakeDriver(kernel=kernel)
    session = Session(kernel, machine, driver=driver)
    block = session.allocate(3 * GIB, Bind((0,)), pin=True)
    moves = kernel.calls["move"]
    session.move(block, Interleave((1, CXL)))
    assert block.bytes_per_node() == {1: 3 * GIB // 2, CXL: 3 * GIB // 2}
    assert kernel.calls["move"] - moves >= 3 * GIB // (64 * MIB), "64 MiB a call at most"
    assert session.stats().mapped_bytes.peak == 3 * GIB
    del block
    assert_empty(session, driver)


def test_small_allocations_that_share_a_registration_do_not_move() -> None:
    session, driver = memory_on(NORMAL)
    alone, *blocks = [session.allocate(4 * KIB, Bind((0,)), pin=True) for _ in range(3)]
    with pytest.raises(ValueError, match="pinned together"):
        session.move(blocks[0], Bind((CXL,)))
    assert all(block.pinned for block in blocks)
    assert driver.registrations == 2
    session.move(alone, Bind((CXL,)))  # the first of a pool shows what its regions are like
    assert alone.bytes_per_node() == {CXL: 4 * KIB}


def test_all_views_of_a_pinned_tensor_follow() -> None:
    session, driver = memory_on(simulated_machine())
    tensor = cxl_offload.empty(1024, 1024, policy="ldram", pin=True, session=session)
    tensor.copy_(torch.arange(1024 * 1024).reshape(1024, 1024))
    view, pointer = tensor[512:].t(), tensor.data_ptr()
    cxl_offload.move(tensor, "cxl", session=session)
    assert tensor.data_ptr() == pointer
    assert cxl_offload.placement_of(view, session=session).granted == {CXL: 2 * MIB}
    assert cxl_offload.placement_of(view, session=session).pinned
    view += 1
    expected = torch.arange(1024 * 1024, dtype=torch.float32).reshape(1024, 1024)
    expected[512:] += 1
    assert torch.equal(tensor, expected)
    del tensor, view
    assert_empty(session, driver)


def test_pinned_memory_of_this_machine_moves_and_is_pinned_again() -> None:
    driver = _C.FakeDriver()
    session = Session.linux(driver=driver)
    node = session.kernel.allowed_nodes[-1]
    block = written(session, session.kernel.allowed_nodes[0])
    session.move(block, Bind((node,)))
    assert block.bytes_per_node() == {node: SIZE}
    assert block.pinned
    assert driver.registrations == 2
    assert contents(block) == PATTERN
