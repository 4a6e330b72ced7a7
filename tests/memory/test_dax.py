"""Device-DAX devices as a source of memory, through the Linux code and through the simulated one.

The Linux code is given a folder with the files of a device, whose memory is an ordinary file: what
a real device adds is tested in a virtual machine that has one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import cxl_offload
from cxl_offload import _C
from cxl_offload.memory import Dax, Session, as_policy, parse_policy
from cxl_offload.topology import DaxDevice

from .dax_devices import (
    ALIGN,
    DEVICE,
    SIZE,
    Place,
    fill,
    is_filled,
    machine_with,
    make_place,
    write_device,
)
from .machines import GIB, KIB, MIB, simulated_machine


@pytest.fixture(params=["linux", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return make_place(request.param, tmp_path)


@pytest.fixture
def session(place: Place) -> Iterator[Session]:
    session = place.session()
    yield session
    session.trim()
    assert session.stats().mapped_bytes.current == 0
    assert all(use.current_bytes == 0 for use in session.stats().devices.values())


def test_block_is_on_the_device_and_on_no_node(session: Session) -> None:
    block = session.allocate(4 * MIB + 1, DEVICE)
    assert block.address % ALIGN == 0
    assert block.held_bytes == 6 * MIB
    assert block.device == "dax0.0"
    assert block.bytes_per_node() == {}
    placement = session.placement(block.address, block.nbytes)
    assert placement.requested == "device dax0.0"
    assert placement.devices == {"dax0.0": 4 * MIB + 1}
    assert placement.granted == {}
    assert placement.nbytes == 4 * MIB + 1
    assert placement.page_bytes == ALIGN
    assert "dax0.0: 4 MiB" in str(placement)
    use = session.stats().devices["dax0.0"]
    assert (use.current_bytes, use.capacity_bytes) == (6 * MIB, SIZE)
    assert all(node.current_bytes == 0 for node in session.stats().nodes.values())


def test_blocks_do_not_overlap_and_keep_their_bytes(session: Session) -> None:
    blocks = [
        session.allocate(size, DEVICE) for size in (5 * MIB, 100, 2 * MIB, 300 * KIB, 7 * MIB)
    ]
    for value, block in enumerate(blocks, start=1):
        fill(block, value)
    assert all(is_filled(block, value) for value, block in enumerate(blocks, start=1))


def test_bytes_are_those_of_the_device_s_file(tmp_path: Path) -> None:
    write_device(tmp_path, "dax0.0")
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    block = session.allocate(4 * MIB, DEVICE)
    fill(block, 0xA5)
    with open(tmp_path / "dev/dax0.0", "rb") as device:
        assert device.read(4 * MIB) == b"\xa5" * (4 * MIB)
    maps = Path("/proc/self/maps").read_text().splitlines()
    lines = [line for line in maps if str(tmp_path) in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{block.address:x}-")
    assert " rw-s " in lines[0]


def test_device_is_used_to_the_last_page_and_no_further(session: Session) -> None:
    block = session.allocate(SIZE, DEVICE)
    with pytest.raises(MemoryError, match=r"map 2 MiB of dax0\.0: 0 B of its 64 MiB are free"):
        session.allocate(1, DEVICE)
    del block
    assert session.allocate(SIZE, DEVICE).nbytes == SIZE
    with pytest.raises(MemoryError, match=r"of its 64 MiB"):
        session.allocate(SIZE + 1, DEVICE)


def test_capacity_set_by_the_user_is_kept(place: Place) -> None:
    session = place.session(limit=8 * MIB)
    block = session.allocate(6 * MIB, DEVICE)
    with pytest.raises(MemoryError, match=r"2 MiB of its 8 MiB are free"):
        session.allocate(4 * MIB, DEVICE)
    assert session.stats().devices["dax0.0"].capacity_bytes == 8 * MIB
    del block
    assert session.allocate(8 * MIB, DEVICE).nbytes == 8 * MIB


def test_holes_serve_together_when_none_is_large_enough(session: Session) -> None:
    """Every second page is free, and one block takes them all."""
    blocks = [session.allocate(ALIGN, DEVICE) for _ in range(SIZE // ALIGN)]
    for value, block in enumerate(blocks[1::2], start=1):
        fill(block, value)
    kept = blocks[1::2]
    del blocks, block
    session.trim()
    whole = session.allocate(SIZE // 2, DEVICE)
    fill(whole, 0xEE)
    assert is_filled(whole, 0xEE)
    assert all(is_filled(block, value) for value, block in enumerate(kept, start=1))
    with pytest.raises(MemoryError):
        session.allocate(1, DEVICE)
    del kept, whole


def test_pinned_block_is_registered_and_stays_on_the_device(place: Place) -> None:
    driver = _C.FakeDriver()
    session = place.session(driver=driver)
    block = session.allocate(4 * MIB, DEVICE, pin=True)
    assert block.pinned
    assert driver.registered_bytes == 4 * MIB
    assert session.placement(block.address, 4 * MIB).devices == {"dax0.0": 4 * MIB}
    driver.launch(7)
    block.record_stream(7)
    address = block.address
    del block
    again = session.allocate(4 * MIB, DEVICE, pin=True)
    assert again.address == address
    assert driver.event_waits == 1
    del again
    session.trim()
    assert driver.registered_bytes == 0
    assert session.stats().devices["dax0.0"].current_bytes == 0


def test_refused_registration_leaves_nothing_behind(place: Place) -> None:
    driver = _C.FakeDriver()
    session = place.session(driver=driver)
    driver.fail_registration(1)
    with pytest.raises(OSError, match="refused"):
        session.allocate(4 * MIB, DEVICE, pin=True)
    assert session.stats().devices["dax0.0"].current_bytes == 0
    assert session.allocate(SIZE, DEVICE, pin=True).pinned


def test_pools_of_one_device_share_its_room(place: Place) -> None:
    """What the pinned pool caches is given back before the unpinned one is refused."""
    session = place.session(driver=_C.FakeDriver())
    session.allocate(SIZE - ALIGN, DEVICE, pin=True)
    assert session.stats().devices["dax0.0"].current_bytes == SIZE - ALIGN
    assert session.allocate(SIZE, DEVICE).nbytes == SIZE


def test_alignment_is_the_device_s_own(tmp_path: Path) -> None:
    write_device(tmp_path, "dax0.0", align=4 * MIB)
    session = Session(_C.linux_kernel(str(tmp_path)), simulated_machine())
    block = session.allocate(5 * MIB, DEVICE)
    assert block.address % (4 * MIB) == 0
    assert block.held_bytes == 8 * MIB
    assert block.page_bytes == 4 * MIB


def test_text_form_is_read_and_written() -> None:
    assert parse_policy("dax:dax0.0") == DEVICE
    assert str(DEVICE) == "dax:dax0.0"
    assert as_policy("dax:dax12.3") == Dax("dax12.3")
    assert as_policy(DEVICE) is DEVICE
    assert hash(DEVICE) == hash(Dax("dax0.0"))


def test_simulated_device_takes_no_memory_before_it_is_written() -> None:
    session = Session.simulated(machine_with(DaxDevice("dax0.0", "devdax", 512 * GIB)))
    block = session.allocate(400 * GIB, DEVICE)
    ctypes.memset(block.address + 399 * GIB, 1, 4096)
    assert session.stats().devices["dax0.0"].current_bytes == 400 * GIB


def test_tensor_on_a_device_is_like_any_other(session: Session) -> None:
    tensor = cxl_offload.zeros(1024, 512, policy="dax:dax0.0", session=session)
    view = tensor[::2]
    tensor += 2
    assert view.sum().item() == 2 * view.numel()
    assert cxl_offload.placement_of(tensor, session=session).devices == {"dax0.0": 2 * MIB}
    assert torch.equal(tensor.clone(), torch.full((1024, 512), 2.0))
    del tensor, view


def test_written_bytes_stay_for_the_next_owner(place: Place) -> None:
    """A device is not cleared; the documentation of Dax says so."""
    first = place.session()
    block = first.allocate(SIZE, DEVICE)
    fill(block, 0x5A)
    del block, first
    assert is_filled(place.session().allocate(SIZE, DEVICE), 0x5A)


class Device(RuleBasedStateMachine):
    """Random allocations and drops on one device; every live block keeps its own bytes."""

    def __init__(self) -> None:
        super().__init__()
        kernel = Session.simulated(machine_with(DaxDevice("dax0.0", "devdax", SIZE))).kernel
        assert isinstance(kernel, _C.SimulatedKernel)
        self.kernel = kernel
        self.driver = _C.FakeDriver()
        self.session = Session(kernel, simulated_machine(), driver=self.driver)
        self.live: dict[int, _C.Allocation] = {}
        self.value = 0

    @rule(size=st.integers(1, 20 * MIB), pin=st.booleans())
    def allocate(self, size: int, pin: bool) -> None:
        try:
            block = self.session.allocate(size, DEVICE, pin=pin)
        except MemoryError:
            live = sum(-(-block.nbytes // ALIGN) * ALIGN for block in self.live.values())
            assert live + size > SIZE - 2 * ALIGN, "slabs of small blocks may hold two pages"
            return
        self.value = self.value % 255 + 1
        ctypes.memset(block.address, self.value, min(size, 64))
        ctypes.memset(block.address + size - min(size, 64), self.value, min(size, 64))
        while self.value in self.live:
            del self.live[self.value]
        self.live[self.value] = block

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.live[data.draw(st.sampled_from(sorted(self.live)))]

    @rule()
    def trim(self) -> None:
        self.session.trim()

    @invariant()
    def blocks_keep_their_bytes_and_the_device_is_not_overfull(self) -> None:
        for value, block in self.live.items():
            ends = min(block.nbytes, 64)
            assert ctypes.string_at(block.address, ends) == bytes([value]) * ends
            last = block.address + block.nbytes - ends
            assert ctypes.string_at(last, ends) == bytes([value]) * ends
        used = self.kernel.dax_mapped_bytes("dax0.0")
        stats = self.session.stats()
        if stats.devices:
            assert used == stats.devices["dax0.0"].current_bytes == stats.mapped_bytes.current
        assert used <= SIZE

    def teardown(self) -> None:
        self.live.clear()
        self.session.trim()
        assert self.kernel.dax_mapped_bytes("dax0.0") == 0
        assert self.driver.registered_bytes == 0


TestDevice = Device.TestCase
TestDevice.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_device_that_left_is_found_by_asking_and_takes_no_memory_of_nodes(tmp_path: Path) -> None:
    """As a file that is cut; a real device leaves in ``tests/vm/guest_removed.py``."""
    session = make_place("linux", tmp_path).session()
    block = session.allocate(8 * MIB, DEVICE)
    fill(block, 7)
    assert session.check().lost == ()
    os.truncate(tmp_path / "dev/dax0.0", 0)
    found = session.check().lost
    assert [(each.offset, each.nbytes, each.node) for each in found] == [(0, 8 * MIB, None)]
    assert "dax0.0" in found[0].name
    before = resident_bytes()
    assert session.check().lost == found
    assert resident_bytes() - before < MIB, "nothing is put in the place of what nobody uses"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
