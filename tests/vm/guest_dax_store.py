"""Inside a machine with real CXL memory: kept blocks on its Device-DAX device, beside pools.

The device is in mode devdax already, and pools have written to it: ``guest_dax.py`` runs before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cxl_offload.kept import (
    KeptBlocks,
    KeptLayout,
    KeptReader,
    KeptStore,
    drop_kept,
    find_device,
    find_kept_devices,
    look_at,
    open_or_read,
    verify_kept,
)
from cxl_offload.memory import Dax, Session, survive_memory_errors
from tests.kept.ground import FACTS, LAYOUT, block_of, key_of, keys_of
from tests.kept.test_kills import faults_of_a_death, reopened
from tests.kept.test_readers import read_beside
from tests.placement.child import run_in_child

PATH = Path("/dev/dax0.0")
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _device_is_free() -> None:
    """What pools wrote is nothing that a store is made over, until somebody says so."""
    block = Session.linux().allocate(2 * MIB, Dax(PATH.name))
    ctypes.memmove(block.address, b"ours now", 8)
    del block
    with pytest.raises(FileExistsError, match="holds something that is no store"):
        KeptStore(PATH, LAYOUT, FACTS)
    with pytest.raises(FileExistsError, match="--force"):
        drop_kept(PATH)
    drop_kept(PATH, force=True)


def test_sizes_are_those_of_the_kernel() -> None:
    device = find_device(PATH)
    assert (device.nbytes, device.align_bytes) == (256 * MIB, 2 * MIB)
    with pytest.raises(MemoryError, match="it has 256 MiB left"):
        KeptStore(PATH, KeptLayout(MIB, 256), FACTS)


def test_blocks_are_there_after_a_kill_and_nothing_else_is() -> None:
    faults: list[str] = []
    for seed in range(5):
        store = reopened(PATH)
        there = store.keys
        store.close()
        faults += faults_of_a_death(PATH, seed, there)
    assert not faults
    assert not verify_kept(PATH).damaged
    assert [each.path for each in find_kept_devices()] == [PATH]


def test_reader_beside_a_writer_never_sees_a_wrong_block() -> None:
    read, faults = read_beside(PATH, 1, 30)
    assert not faults
    assert read


HOLD = """
import sys
from cxl_offload.kept import open_or_read
from tests.kept.ground import FACTS, LAYOUT
store = open_or_read("/dev/dax0.0", LAYOUT, FACTS)
print(type(store).__name__, flush=True)
sys.stdin.read()
"""


def holder() -> subprocess.Popen[str]:
    """Another process that has opened the store, and says how."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_one_process_writes_and_others_read_and_no_pool_gets_in() -> None:
    writer = holder()
    assert said(writer) == "KeptStore"
    reading = open_or_read(PATH, LAYOUT, FACTS)
    assert isinstance(reading, KeptReader)
    assert look_at(PATH).in_use
    with pytest.raises(BlockingIOError, match="stop that one first"):
        drop_kept(PATH)
    with pytest.raises(OSError, match="another session or process holds it") as caught:
        Session.linux().allocate(4096, Dax(PATH.name))
    assert caught.value.errno == errno.EBUSY
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with pytest.raises(OSError, match="another session or process holds it"):
        Session.linux().allocate(4096, Dax(PATH.name))
    reading.close()
    block = Session.linux().allocate(4096, Dax(PATH.name))
    with pytest.raises(OSError, match="a pool or a store"):
        KeptStore(PATH, LAYOUT, FACTS)
    del block


def test_device_of_another_user_is_refused() -> None:
    drop_kept(PATH, force=True)
    reopened(PATH).close()
    os.chown(PATH, 1000, -1)
    try:
        with pytest.raises(PermissionError, match=r"belongs to user 1000.*sudo chown"):
            reopened(PATH)
        assert find_kept_devices() == ()
    finally:
        os.chown(PATH, 0, -1)
    os.chmod(PATH, 0o660)
    with pytest.raises(PermissionError, match="others may open it"):
        reopened(PATH)
    os.chmod(PATH, 0o600)
    reopened(PATH).close()


def test_placement_of_the_blocks_can_be_asked() -> None:
    store = KeptStore(PATH, LAYOUT, FACTS)
    Session.linux().placement(store.address, LAYOUT.slots * LAYOUT.block_bytes)
    store.close()


def test_dropped_store_is_gone_for_its_reader_and_its_place_is_free() -> None:
    store = reopened(PATH)
    for key in keys_of(3, 20):
        store.put(key, block_of(key))
    keys = store.keys
    store.close()
    reading = KeptReader(PATH, FACTS)
    assert drop_kept(PATH) == LAYOUT.file_bytes
    assert [reading.read(key) for key in keys] == [None] * len(keys)
    reading.close()
    store = KeptBlocks(KeptStore(PATH, LAYOUT, FACTS | {"model": "other"}))
    assert len(store) == 0
    key = key_of(random.Random(2).randrange(24))
    store.put(key, block_of(key))
    assert store.get(key) == block_of(key)
    store.close()
    drop_kept(PATH)


def test_poisoned_page_of_the_device_drops_the_blocks_on_it_and_no_other() -> None:
    """Of 2 MiB, which is what the device maps at once; far behind what other tests use."""
    layout = KeptLayout(block_bytes=512 << 10, slots=400)
    drop_kept(PATH, force=True)

    def use() -> None:
        store = KeptBlocks(KeptStore(PATH, layout, FACTS))
        first = store.store.address - layout.data_at
        for number in range(8):
            store.put(key_of(number), block_of(key_of(number), layout))
        places = {each: layout.block_at(slot_of(store, each)) for each in range(8)}
        at = places[3] // 4096 * 4096
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first + at), ctypes.c_size_t(4096), 100
        )  # MADV_HWPOISON
        begin = at // (2 * MIB) * 2 * MIB
        lost = {
            number
            for number, place in places.items()
            if place < begin + 2 * MIB and begin < place + layout.block_bytes
        }
        for number in range(8):
            found = store.get(key_of(number))
            wanted = None if number in lost else block_of(key_of(number), layout)
            assert found == wanted, number
        assert 1 <= len(lost) < 8
        assert store.store.lost_slots == {
            slot
            for slot in range(layout.slots)
            if layout.block_at(slot) < begin + 2 * MIB
            and begin < layout.block_at(slot) + layout.block_bytes
        }
        store.close()

    with survive_memory_errors(interrupt=False):
        run_in_child(use)
    drop_kept(PATH)


def slot_of(store: KeptBlocks, number: int) -> int:
    slot = store.find(key_of(number))
    assert slot is not None
    return slot
