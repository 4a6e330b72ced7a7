"""Inside a machine with real CXL memory: a long-term pin, seen by the pages themselves.

Runs in `cxl-movable` and `cxl-kernel`; only what is expected of the CXL node differs.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from cxl_offload import _C
from cxl_offload.errors import PlacementError
from cxl_offload.memory import Bind, Session, Weighted
from cxl_offload.topology.hazards import find_hazards
from tests.vm.harness.machine import load
from tests.vm.long_term_pin import LongTermPins

SPEC = load(os.environ["CXL_OFFLOAD_TEST_MACHINE"])
assert SPEC.cxl is not None
CXL = SPEC.cxl.node
MOVABLE = SPEC.cxl.online == "online_movable"
SIZE = 4 << 20
PATTERN = bytes(range(256)) * (SIZE // 256)


def pinned_session() -> tuple[Session, LongTermPins, _C.FakeDriver]:
    driver = _C.FakeDriver()
    pins = LongTermPins()
    driver.pin_with(pins.pin, pins.unpin)
    return Session.linux(driver=driver), pins, driver


def written(session: Session, node: int) -> _C.Allocation:
    block = session.allocate(SIZE, Bind((node,)), pin=True)
    ctypes.memmove(block.address, PATTERN, SIZE)
    return block


def contents(block: _C.Allocation) -> bytes:
    return ctypes.string_at(block.address, SIZE)


def test_zone_is_what_the_machine_says() -> None:
    session = Session.linux()
    assert (session.kernel.movable_bytes(CXL) > 0) == MOVABLE
    assert (session.machine.node(CXL).movable_bytes > 0) == MOVABLE
    assert session.kernel.movable_bytes(0) == session.machine.node(0).movable_bytes
    names = {hazard.name for hazard in find_hazards()}
    assert ("movable-zone" in names) == MOVABLE


def test_strict_pin_is_refused_exactly_where_pages_would_move() -> None:
    session, pins, driver = pinned_session()
    if not MOVABLE:
        block = session.allocate(SIZE, Bind((CXL,)), pin=True)
        assert block.bytes_per_node() == {CXL: SIZE}
        assert pins.count == 1
        assert not block.notes
        return
    with pytest.raises(PlacementError, match=rf"left node {CXL} for node 0.*online_kernel"):
        session.allocate(SIZE, Bind((CXL,)), pin=True)
    assert pins.count == 0
    assert driver.registered_bytes == 0
    assert session.stats().mapped_bytes.current == 0


def test_lenient_pin_says_where_the_pages_are() -> None:
    session, pins, _ = pinned_session()
    block = session.allocate(SIZE, Bind((CXL,)), pin=True, strict=False)
    placement = session.placement(block.address, SIZE)
    assert placement.granted == ({0: SIZE} if MOVABLE else {CXL: SIZE})
    assert bool(placement.notes) == MOVABLE
    held = {node: use.current_bytes for node, use in session.stats().nodes.items()}
    assert {node: count for node, count in held.items() if count} == placement.granted
    del block
    session.trim()
    assert pins.count == 0


def test_interleave_keeps_its_share_exactly_where_pages_stay() -> None:
    session, _, _ = pinned_session()
    block = session.allocate(2 * SIZE, Weighted({0: 1, CXL: 1}), pin=True, strict=False)
    assert block.bytes_per_node() == ({0: 2 * SIZE} if MOVABLE else {0: SIZE, CXL: SIZE})


def test_pinned_page_does_not_move_by_itself() -> None:
    """What the package guards against: the kernel refuses to move what is pinned."""
    pins = LongTermPins()
    other = Session.linux()
    block = other.allocate(SIZE, Bind((0,)))
    pins.pin(block.address, SIZE)
    with pytest.raises((OSError, MemoryError)):
        other.move(block, Bind((CXL,)))
    assert block.bytes_per_node() == {0: SIZE}
    pins.unpin(block.address)
    other.move(block, Bind((CXL,)))
    assert block.bytes_per_node() == {CXL: SIZE}


def test_pinned_live_memory_moves_with_its_contents() -> None:
    session, pins, driver = pinned_session()
    block = written(session, 0)
    address = block.address
    view = np.from_dlpack(block).view(np.uint8)[7::4096]
    if MOVABLE:
        with pytest.raises(PlacementError, match="back where it was"):
            session.move(block, Bind((CXL,)))
        assert block.bytes_per_node() == {0: SIZE}
    else:
        session.move(block, Bind((CXL,)))
        assert block.bytes_per_node() == {CXL: SIZE}
        session.move(block, Weighted({0: 1, CXL: 1}))
        assert block.bytes_per_node() == {0: SIZE // 2, CXL: SIZE // 2}
    assert (block.address, contents(block)) == (address, PATTERN)
    view[-1] = 0xA5
    assert (view[:-1] == 7).all()
    assert contents(block)[7 - 4096] == 0xA5
    assert block.pinned
    assert pins.count == 1
    assert driver.registered_bytes == SIZE


def test_move_that_cannot_be_pinned_again_leaves_the_memory_valid() -> None:
    session, pins, driver = pinned_session()
    block = written(session, 0)
    driver.fail_registration(1)
    with pytest.raises(PlacementError, match="not pinned any more"):
        session.move(block, Bind((CXL,)))
    assert block.bytes_per_node() == {CXL: SIZE}
    assert contents(block) == PATTERN
    assert pins.count == 0
    assert not block.pinned
    session.move(block, Bind((0,)))
    assert block.pinned
    assert block.bytes_per_node() == {0: SIZE}
    assert contents(block) == PATTERN
