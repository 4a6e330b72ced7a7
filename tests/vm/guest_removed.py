"""Inside a machine with real CXL memory: its device leaves while a pool or a store lies on it.

``guest_dax.py`` has put the device into mode devdax before. The driver is taken off as an
administrator, or a card that is pulled in order, does it; the kernel takes the pages away from all
who have mapped them.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cxl_offload import _C
from cxl_offload.errors import MemoryLostError
from cxl_offload.kept import KeptBlocks, KeptReader, KeptStore, drop_kept, look_at
from cxl_offload.memory import Dax, Session, survive_memory_errors
from cxl_offload.memory.session import Allocation
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of
from tests.placement.child import run_in_child
from tests.vm.guest_poison import ended_by, read, view

MIB = 1 << 20
DEVICE = Dax("dax0.0")
PATH = Path("/dev/dax0.0")
DRIVER = Path("/sys/bus/dax/drivers/device_dax")
REGION = Path("/sys/bus/cxl/drivers/cxl_region")


def leave() -> None:
    (DRIVER / "unbind").write_text(PATH.name)


def come_back() -> None:
    """After all who had it open have ended: before, the kernel gives it a file that never opens."""
    device = Path("/sys/bus/dax/devices") / PATH.name
    if device.exists() and not (device / "driver").exists():
        (DRIVER / "bind").write_text(PATH.name)


@pytest.fixture(autouse=True)
def _device_is_there() -> Iterator[None]:
    come_back()
    yield
    come_back()


def filled(nbytes: int = 4 * MIB) -> Allocation:
    block = Session.linux().allocate(nbytes, DEVICE)
    ctypes.memset(block.address, 7, 64 << 10)
    return block


def floats(block: Allocation, *shape: int) -> NDArray[np.float32]:
    raw = (ctypes.c_float * int(np.prod(shape))).from_address(block.address)
    return np.ctypeslib.as_array(raw).reshape(shape)


def test_without_protection_the_process_that_reads_is_ended() -> None:
    def use() -> None:
        block = filled()
        leave()
        read(block.address)

    assert ended_by(use) == signal.SIGBUS


def test_operator_on_a_pool_raises_one_error_with_the_name_of_the_device() -> None:
    def use() -> None:
        session = Session.linux()
        block = session.allocate(2 * MIB, DEVICE)
        weight = floats(block, 64, 256)
        weight[:] = 1
        x, y = np.ones((4, 256), np.float32), np.empty((4, 64), np.float32)
        team = _C.WorkerTeam([(-1, 2, [])])
        leave()
        for _ in range(2):
            with pytest.raises(MemoryLostError, match=r"device dax0\.0") as caught:
                _C.run_linear(view(x), view(weight), view(y), team)
            assert "\n" not in str(caught.value)
        assert [each.nbytes for each in session.lost()] == [2 * MIB]
        del weight, block
        session.trim()
        assert session.lost() == ()
        assert session.stats().mapped_bytes.current == 0
        with pytest.raises(OSError, match=r"dax0\.0"):
            session.allocate(2 * MIB, DEVICE)
        with pytest.raises(ValueError, match="not in mode devdax"):
            Session.linux().allocate(2 * MIB, DEVICE)

    with survive_memory_errors(interrupt=False):
        run_in_child(use)


def test_main_thread_is_told_where_no_operator_of_ours_reads() -> None:
    def use() -> None:
        block = filled()
        leave()
        with pytest.raises(MemoryLostError, match=r"device dax0\.0"):
            read_often(block)

    def read_often(block: Allocation) -> None:
        for _ in range(100):
            read(block.address)

    with survive_memory_errors():
        run_in_child(use)


def test_asking_finds_what_nobody_used() -> None:
    def use() -> None:
        session = Session.linux()
        block = session.allocate(8 * MIB, DEVICE)
        assert session.check().lost == ()
        leave()
        assert session.lost() == ()
        found = session.check().lost
        assert [(each.offset, each.nbytes, each.node) for each in found] == [(0, 8 * MIB, None)]
        assert "dax0.0" in found[0].name
        del block

    run_in_child(use)  # without survive_memory_errors


def test_bytes_are_on_the_device_when_it_is_back() -> None:
    def use() -> None:
        block = filled()
        leave()
        assert read(block.address) == 0xFF
        ctypes.memset(block.address, 5, 64)
        assert read(block.address) == 5, "memory of this process, until it ends"

    with survive_memory_errors(interrupt=False):
        run_in_child(use)
    come_back()
    again = Session.linux().allocate(4 * MIB, DEVICE)
    assert ctypes.string_at(again.address, 64 << 10) == b"\7" * (64 << 10)


def test_store_finds_and_keeps_nothing_and_is_found_again_when_the_device_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drop_kept(PATH, force=True)
    keys = [key_of(number) for number in range(5)]

    def use() -> None:
        store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS))
        reading = KeptReader(PATH, FACTS)
        for key in keys:
            store.put(key, block_of(key))
        reading.refresh()
        leave()
        caplog.clear()
        assert [store.get(key) for key in keys] == [None] * 5
        store.put(key_of(9), block_of(key_of(9)))
        assert len(store) == 0
        assert [reading.read(key) for key in keys] == [None] * 5
        assert "not in mode devdax" in look_at(PATH).problem
        (line,) = (each.message for each in caplog.records if each.levelno == logging.ERROR)
        assert line.startswith("/dev/dax0.0 is gone")
        reading.close()
        store.close()

    with survive_memory_errors(interrupt=False):
        run_in_child(use)
    come_back()
    store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS))
    assert {key: store.get(key) for key in store.keys} == {key: block_of(key) for key in keys}
    store.close()


def test_region_of_the_card_leaves_while_a_pool_and_its_error_are_in_use() -> None:
    """The device itself is gone then, and what opens it by name says so."""

    def use() -> None:
        block = filled()
        (region,) = (path.name for path in REGION.iterdir() if path.name.startswith("region"))
        (REGION / "unbind").write_text(region)
        assert read(block.address) == 0xFF
        with pytest.raises(OSError, match="no such Device-DAX device; there are: none"):
            KeptStore(PATH, LAYOUT, FACTS)
        with pytest.raises(ValueError, match="no such Device-DAX device"):
            Session.linux().allocate(4096, DEVICE)
        del block

    with survive_memory_errors(interrupt=False):
        run_in_child(use)
