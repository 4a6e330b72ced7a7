"""Pinning does not move pages unnoticed: a movable node, seen through a driver that pins for long.

The driver and the nodes are simulated; a pin moves pages out of ZONE_MOVABLE and holds the rest, as
the kernel does (FOLL_LONGTERM).
"""

from __future__ import annotations

import dataclasses

import pytest

from cxl_offload import _C
from cxl_offload.errors import PlacementError
from cxl_offload.memory import Bind, Interleave, Preferred, Session, Weighted
from cxl_offload.topology import Machine, Node, Zone

from .machines import GIB, KIB, MIB, simulated_machine

CXL = 2


def with_zone(machine: Machine, node_id: int, *names: str) -> Machine:
    """The machine with the memory of one node in these zones, in equal parts."""

    def changed(node: Node) -> Node:
        share = node.capacity_bytes // len(names)
        zones = tuple(Zone(name, share) for name in names)
        return dataclasses.replace(node, zones=zones) if node.id == node_id else node

    return dataclasses.replace(machine, nodes=tuple(changed(node) for node in machine.nodes))


def memory_on(machine: Machine) -> tuple[Session, _C.FakeDriver]:
    """A session whose driver pins pages of the session's own kernel."""
    kernel = Session.simulated(machine).kernel
    assert isinstance(kernel, _C.SimulatedKernel)
    driver = _C.FakeDriver(kernel=kernel)
    return Session(kernel, machine, driver=driver), driver


def kernel_of(session: Session) -> _C.SimulatedKernel:
    assert isinstance(session.kernel, _C.SimulatedKernel)
    return session.kernel


def assert_empty(session: Session, driver: _C.FakeDriver) -> None:
    session.trim()
    stats = session.stats()
    assert stats.mapped_bytes.current == 0
    assert stats.asked_bytes.current == 0
    assert all(use.current_bytes == 0 for use in stats.nodes.values())
    assert [kernel_of(session).used_bytes(node) for node in range(3)] == [0, 0, 0]
    assert kernel_of(session).mapping_count == 0
    assert driver.registered_bytes == 0
    assert driver.wrong_unregisters == 0
    assert driver.events == 0


MOVABLE = with_zone(simulated_machine(), CXL, "Movable")
NORMAL = with_zone(simulated_machine(), CXL, "Normal")


def test_strict_pin_on_a_movable_node_is_refused_and_leaves_nothing() -> None:
    session, driver = memory_on(MOVABLE)
    with pytest.raises(PlacementError) as caught:
        session.allocate(8 * MIB, Bind((CXL,)), pin=True)
    message = str(caught.value)
    for part in ("8 MiB left node 2 for node 0", "ZONE_MOVABLE", "online_kernel", "Device-DAX"):
        assert part in message
    assert driver.registrations == 1
    assert_empty(session, driver)
    assert session.allocate(8 * MIB, Bind((0,)), pin=True).pinned


@pytest.mark.parametrize("policy", [Bind((CXL,)), Preferred((CXL,))], ids=str)
def test_lenient_pin_on_a_movable_node_is_reported_and_counted_where_it_went(
    policy: Bind | Preferred,
) -> None:
    session, driver = memory_on(MOVABLE)
    block = session.allocate(8 * MIB, policy, pin=True, strict=False)
    placement = session.placement(block.address, block.nbytes)
    assert placement.pinned
    assert placement.granted == {0: 8 * MIB}
    assert any("8 MiB left node 2 for node 0" in note for note in placement.notes)
    nodes = session.stats().nodes
    assert nodes[0].current_bytes == 8 * MIB
    assert nodes[CXL].current_bytes == 0
    del block
    assert_empty(session, driver)


def test_lenient_interleave_loses_only_its_movable_share() -> None:
    session, driver = memory_on(MOVABLE)
    policy = Weighted({1: 3, CXL: 1})
    block = session.allocate(16 * MIB, policy, pin=True, strict=False)
    assert block.bytes_per_node() == {1: 12 * MIB, 0: 4 * MIB}
    assert any("4 MiB left node 2 for node 0" in note for note in block.notes)
    with pytest.raises(PlacementError, match="4 MiB left node 2"):
        session.allocate(16 * MIB, policy, pin=True)
    del block
    assert_empty(session, driver)


@pytest.mark.parametrize(
    "machine",
    [NORMAL, with_zone(simulated_machine(), CXL, "Normal", "Movable"), simulated_machine()],
    ids=["normal", "partly movable", "zones unknown"],
)
def test_pin_on_a_node_that_keeps_pins_stays(machine: Machine) -> None:
    session, driver = memory_on(machine)
    block = session.allocate(8 * MIB, Bind((CXL,)), pin=True)
    assert block.bytes_per_node() == {CXL: 8 * MIB}
    assert not block.notes
    assert session.kernel.movable_bytes(CXL) == 0
    del block
    assert_empty(session, driver)


def test_pages_that_pinning_moved_are_not_used_again_for_the_same_policy() -> None:
    session, driver = memory_on(MOVABLE)
    address = session.allocate(8 * MIB, Bind((CXL,)), pin=True, strict=False).address
    again = session.allocate(8 * MIB, Bind((CXL,)), pin=True, strict=False)
    assert driver.registrations == 2, f"a fresh region, though {address:#x} was there"
    assert any("left node 2" in note for note in again.notes)
    del again
    assert_empty(session, driver)


def test_pin_without_room_outside_the_movable_zone_is_out_of_memory() -> None:
    machine = with_zone(simulated_machine((256 * MIB, 256 * MIB, 4 * GIB)), CXL, "Movable")
    session, driver = memory_on(machine)
    with pytest.raises(MemoryError, match="outside ZONE_MOVABLE"):
        session.allocate(1 * GIB, Bind((CXL,)), pin=True, strict=False)
    assert_empty(session, driver)


def test_unpinned_memory_of_a_movable_node_stays_where_it_is() -> None:
    session, driver = memory_on(MOVABLE)
    block = session.allocate(8 * MIB, Interleave((0, CXL)))
    assert block.bytes_per_node() == {0: 4 * MIB, CXL: 4 * MIB}
    assert driver.registrations == 0
    assert session.kernel.movable_bytes(CXL) == 4 * GIB
    del block
    assert_empty(session, driver)


def test_this_machine_s_zones_agree_with_the_topology() -> None:
    session = Session.linux()
    for node in session.machine.nodes:
        if node.has_memory:
            assert session.kernel.movable_bytes(node.id) == node.movable_bytes


def test_small_pinned_allocations_know_that_their_chunk_was_moved() -> None:
    session, driver = memory_on(MOVABLE)
    blocks = [session.allocate(4 * KIB, Bind((CXL,)), pin=True, strict=False) for _ in range(3)]
    for block in blocks:
        assert block.bytes_per_node() == {0: 4 * KIB}
        assert any("left node 2" in note for note in block.notes)
    del block, blocks
    assert_empty(session, driver)


def test_trim_after_a_fault_of_the_gpu_returns_what_is_not_its(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session, driver = memory_on(NORMAL)
    session.allocate(8 * MIB, Bind((0,)))
    pinned = session.allocate(4 * MIB, Bind((1,)), pin=True)
    pinned.record_stream(7)
    driver.launch(7)
    del pinned
    driver.break_context()
    assert session.trim() == 8 * MIB
    assert "what the GPU may still use stays" in caplog.text
    assert "broken" in caplog.text
    assert session.stats().mapped_bytes.current == 4 * MIB
