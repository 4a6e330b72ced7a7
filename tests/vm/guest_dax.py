"""Inside a machine with real CXL memory: its Device-DAX device, taken off the nodes and mapped.

Runs in `cxl-movable`, where the kernel can take the memory back. Every access is emulated: a few
MiB are enough.
"""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload import _C, discover
from cxl_offload.memory import Dax, Session
from tests.vm.long_term_pin import LongTermPins

DRIVERS = Path("/sys/bus/dax/drivers")
NODES = Path("/sys/devices/system/node")
MIB = 1 << 20
_OFFLINE_TIMEOUT_S = 30.0


def only_device() -> Path:
    (device,) = Path("/sys/bus/dax/devices").glob("dax*")
    return device


def take_offline(node: int) -> None:
    deadline = time.monotonic() + _OFFLINE_TIMEOUT_S
    for state in sorted((NODES / f"node{node}").glob("memory*/state")):
        while state.read_text().strip() != "offline":
            try:
                state.write_text("offline")
            except OSError:
                assert time.monotonic() < deadline, f"{state} stays online"
                time.sleep(0.2)


def make_devdax(device: Path) -> None:
    """What `daxctl reconfigure-device --mode=devdax --force` does."""
    take_offline(int((device / "target_node").read_text()))
    (DRIVERS / "kmem/unbind").write_text(device.name)
    (DRIVERS / "device_dax/new_id").write_text(device.name)
    if not (device / "driver").exists():
        (DRIVERS / "device_dax/bind").write_text(device.name)


@pytest.fixture(scope="module")
def policy() -> Dax:
    """The device, in mode devdax from here on. Its first mode is tested on the way."""
    device = only_device()
    node = int((device / "target_node").read_text())
    assert discover().dax[0].mode == "system-ram"
    with pytest.raises(ValueError, match=f"mode system-ram, so its memory is node {node}"):
        Session.linux().allocate(4096, Dax(device.name))
    make_devdax(device)
    assert not discover().node(node).has_memory
    return Dax(device.name)


@pytest.fixture
def session(policy: Dax) -> Iterator[Session]:
    session = Session.linux()
    yield session
    session.trim()
    assert session.stats().devices[policy.device].current_bytes == 0
    assert session.stats().mapped_bytes.current == 0


def mapping_of(address: int) -> str:
    """The line of /proc/self/maps that holds an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if int(first, 16) <= address < int(rest.split()[0], 16):
            return line
    raise AssertionError(f"{address:#x} is not mapped")


def test_topology_shows_the_device_and_its_cxl_chain(policy: Dax) -> None:
    (device,) = discover().dax
    assert (device.name, device.mode) == (policy.device, "devdax")
    assert device.size_bytes == 256 * MIB
    assert device.cxl is not None
    assert device.cxl.memdevs == ("mem0",)


def test_block_is_a_mapping_of_the_device_and_keeps_its_bytes(
    policy: Dax, session: Session
) -> None:
    pattern = bytes(range(256)) * (MIB // 256)
    block = session.allocate(4 * MIB, policy)
    line = mapping_of(block.address)
    assert line.endswith(f"/dev/{policy.device}")
    assert " rw-s " in line
    assert block.address % (2 * MIB) == 0
    ctypes.memmove(block.address + MIB, pattern, MIB)
    assert ctypes.string_at(block.address + MIB, MIB) == pattern
    assert session.placement(block.address, 4 * MIB).devices == {policy.device: 4 * MIB}
    assert block.bytes_per_node() == {}
    del block


def test_device_is_full_at_its_own_size(policy: Dax, session: Session) -> None:
    with pytest.raises(MemoryError, match=r"256 MiB of its 256 MiB are free"):
        session.allocate(256 * MIB + 1, policy)
    blocks = [session.allocate(64 * MIB, policy) for _ in range(4)]
    with pytest.raises(MemoryError, match=r"0 B of its 256 MiB are free"):
        session.allocate(1, policy)
    del blocks[1:3]
    blocks.append(session.allocate(128 * MIB, policy))
    ctypes.memset(blocks[-1].address + 127 * MIB, 1, 4096)
    del blocks


def test_bytes_stay_for_the_next_session(policy: Dax) -> None:
    first = Session.linux()
    block = first.allocate(2 * MIB, policy)
    ctypes.memset(block.address, 0x5A, 64 << 10)
    del block, first
    again = Session.linux().allocate(2 * MIB, policy)
    assert ctypes.string_at(again.address, 64 << 10) == b"\x5a" * (64 << 10)


def test_long_term_pin_leaves_the_memory_on_the_device(policy: Dax) -> None:
    """Where the same memory as a movable node would have lost its pages to node 0."""
    driver, pins = _C.FakeDriver(), LongTermPins()
    driver.pin_with(pins.pin, pins.unpin)
    session = Session.linux(driver=driver)
    block = session.allocate(4 * MIB, policy, pin=True)
    assert pins.count == 1
    assert mapping_of(block.address).endswith(f"/dev/{policy.device}")
    assert session.placement(block.address, 4 * MIB).devices == {policy.device: 4 * MIB}
    ctypes.memset(block.address, 0x3C, 64 << 10)
    assert ctypes.string_at(block.address, 64 << 10) == b"\x3c" * (64 << 10)
    del block
    session.trim()
    assert pins.count == 0


CHILD = """
import sys
from cxl_offload.memory import Dax, Session
try:
    Session.linux().allocate(4096, Dax(sys.argv[1]))
except OSError as error:
    sys.exit(error.errno)
"""


def test_other_process_is_refused_while_the_device_is_held(policy: Dax) -> None:
    session = Session.linux()
    block = session.allocate(2 * MIB, policy)
    command = [sys.executable, "-c", CHILD, policy.device]
    assert subprocess.run(command, check=False).returncode == errno.EBUSY
    del block, session
    assert subprocess.run(command, check=False).returncode == 0
