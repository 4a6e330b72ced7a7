"""Memory that breaks, on this machine: signals as the kernel sends them, and files that shrink."""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import mmap
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxl_offload import _C
from cxl_offload.errors import LostMemory, MemoryLostError
from cxl_offload.memory import (
    Session,
    SharedRegion,
    survive_memory_errors,
    written_anew,
)
from cxl_offload.memory.lost import add_owner, survives
from cxl_offload.memory.watched_mapping import WatchedMapping
from cxl_offload.topology import load_machine
from cxl_offload.transfer import HostCopier
from tests.memory.failures import EARLY, USED, lose

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _blocks_go_with_their_test() -> Iterator[None]:
    """A caught error holds the frames of its traceback, and so the block that lost something."""
    yield
    gc.collect()


@pytest.fixture
def session() -> Session:
    return Session.linux()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Survives without interrupting the test."""
    with survive_memory_errors(interrupt=False):
        yield
    assert not survives()


def bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@pytest.mark.parametrize("first", [True, False])
def test_interruption_ends_with_the_last_who_wants_it(session: Session, first: bool) -> None:
    block = session.allocate(MIB, "bind:0")
    one, other = (survive_memory_errors(interrupt=each) for each in (first, not first))
    (one if first else other).stop()
    lose(block.address + 9 * PAGE)
    for _ in range(100):
        pass
    assert survives()
    (other if first else one).stop()
    assert not survives()


def test_error_of_another_process_says_the_same(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    with survive_memory_errors(interrupt=False):
        lose(block.address + 9 * PAGE)
        at = block.address + 9 * PAGE
        with pytest.raises(MemoryLostError) as raised:
            HostCopier().copy(target=block.address, source=at, nbytes=PAGE)
    again = pickle.loads(pickle.dumps(raised.value))
    assert type(again) is MemoryLostError
    assert str(again) == str(raised.value) == str(copy.copy(raised.value))
    assert (again.losses, again.is_whole) == (raised.value.losses, raised.value.is_whole)


def test_python_handler_of_others_is_called_for_their_signals_and_is_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGBUS, lambda number, frame: called.append(number))
    try:
        with survive_memory_errors():
            signal.raise_signal(signal.SIGBUS)
            assert called == [signal.SIGBUS]
        signal.raise_signal(signal.SIGBUS)
        assert called == [signal.SIGBUS] * 2
    finally:
        signal.signal(signal.SIGBUS, before)


def test_nested_use_ends_with_the_last(session: Session) -> None:
    outer = survive_memory_errors(interrupt=False)
    with survive_memory_errors(interrupt=False):
        pass
    assert survives()
    outer.stop()
    outer.stop()
    assert not survives()


@pytest.mark.usefixtures("quiet")
def test_lost_page_reads_as_nan_and_the_rest_is_whole(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    ctypes.memset(block.address, 7, MIB)
    lose(block.address + 2 * PAGE + 9)
    expected = b"\7" * 2 * PAGE + b"\xff" * PAGE + b"\7" * (MIB - 3 * PAGE)
    assert bytes_at(block.address, MIB) == expected
    (lost,) = session.lost()
    assert (lost.offset, lost.nbytes, lost.node) == (2 * PAGE, PAGE, 0)


@pytest.mark.usefixtures("quiet")
def test_early_notice_counts_as_lost(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    lose(block.address, code=EARLY)
    assert len(session.lost()) == 1


@pytest.mark.usefixtures("quiet")
def test_copy_refuses_lost_bytes_and_what_it_writes_is_whole_again(session: Session) -> None:
    source, target = session.allocate(MIB, "bind:0"), session.allocate(MIB, "bind:0")
    ctypes.memset(source.address, 1, MIB)
    ctypes.memset(target.address, 2, MIB)
    copier = HostCopier()
    lose(source.address + PAGE)
    with pytest.raises(MemoryLostError, match="bytes 4096 to 8191 of an allocation"):
        copier.copy(target=target.address, source=source.address, nbytes=MIB)
    assert bytes_at(target.address, MIB) == b"\2" * MIB
    copier.copy(target=target.address, source=source.address, nbytes=PAGE)
    copier.copy_blocks(
        targets=[target.address + 2 * PAGE], sources=[source.address + 2 * PAGE], sizes=PAGE
    )
    with pytest.raises(MemoryLostError):
        copier.copy_blocks(targets=[target.address], sources=[source.address + PAGE], sizes=PAGE)
    copier.copy(target=source.address + PAGE, source=target.address, nbytes=PAGE)
    assert session.lost() == ()
    copier.copy(target=target.address, source=source.address, nbytes=MIB)
    assert bytes_at(target.address, MIB) == b"\1" * MIB


@pytest.mark.usefixtures("quiet")
def test_losses_end_with_what_lay_there(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    lose(block.address)
    address = block.address
    del block
    again = session.allocate(MIB, "bind:0")
    assert again.address == address
    assert session.lost() == ()
    lose(again.address)
    written_anew(again.address, PAGE)
    assert session.lost() == ()


@pytest.mark.usefixtures("quiet")
def test_cached_memory_that_fails_is_nobodys(session: Session) -> None:
    block = session.allocate(64 * MIB, "bind:0")
    address = block.address
    del block
    lose(address)
    assert session.lost() == ()
    again = session.allocate(64 * MIB, "bind:0")
    assert again.address == address
    assert _C.losses_in(address, again.nbytes) == []


@pytest.mark.usefixtures("quiet")
def test_small_allocations_of_a_lost_page_are_all_named(session: Session) -> None:
    first, second = session.allocate(100, "bind:0"), session.allocate(100, "bind:0")
    lose(first.address)
    copier, target = HostCopier(), session.allocate(MIB, "bind:0")
    for block in (first, second):
        with pytest.raises(MemoryLostError, match="an allocation of 100 B"):
            copier.copy(target=target.address, source=block.address, nbytes=100)
    del first
    with pytest.raises(MemoryLostError):
        copier.copy(target=target.address, source=second.address, nbytes=100)


def test_another_thread_that_uses_lost_memory_tells_the_main_thread(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    thread = threading.Thread(target=lose, args=(block.address,))

    def wait() -> None:
        thread.start()
        thread.join()
        for _ in range(1000):
            pass

    with survive_memory_errors(), pytest.raises(MemoryLostError):
        wait()


@pytest.mark.usefixtures("quiet")
def test_file_that_becomes_shorter_loses_the_pages_behind_its_end(tmp_path: Path) -> None:
    region = SharedRegion("cut", 4 * PAGE, root=tmp_path)
    ctypes.memset(region.address, 3, 4 * PAGE)
    os.ftruncate(region.file, 2 * PAGE)
    assert bytes_at(region.address, 4 * PAGE) == b"\3" * 2 * PAGE + b"\xff" * 2 * PAGE
    rows = _C.losses_in(region.address, region.nbytes)
    found = sorted((row[1] - region.address, row[2]) for row in rows)  # memcpy may begin at the end
    assert found == [
        (2 * PAGE, PAGE),
        (3 * PAGE, PAGE),
    ]
    address = region.address
    region.close()
    assert _C.losses_in(address, 4 * PAGE) == []


def test_closed_and_dropped_mappings_are_watched_no_more(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE))
    for close in (True, False):
        with path.open("r+b") as file:
            mapping = WatchedMapping(file.fileno(), 4 * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if close:
            mapping.close()
        del mapping
        gc.collect()
        child = os.fork()
        if child == 0:
            survive_memory_errors(interrupt=False)
            lose(address)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS


@pytest.mark.usefixtures("quiet")
def test_forked_child_is_told_of_inherited_memory(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    child = os.fork()
    if child == 0:
        lose(block.address)
        try:
            HostCopier().copy(target=block.address + PAGE, source=block.address, nbytes=PAGE)
        except MemoryLostError as error:
            os._exit(0 if "memory of the parent process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session.lost() == ()


class Owner:
    """Knows what lies in one range, and may write it anew."""

    def __init__(self, address: int, nbytes: int, *, itself: bool = False) -> None:
        self.address, self.nbytes, self.tells_itself = address, nbytes, itself
        self.can = True
        add_owner(self)

    def named(self, address: int) -> tuple[str, int] | None:
        inside = self.address <= address < self.address + self.nbytes
        return ("weight of the head", self.address) if inside else None

    def restore(self, address: int, nbytes: int) -> bool:
        if self.can:
            ctypes.memset(address, 5, nbytes)
        return self.can


def test_owner_names_what_is_lost_and_writes_it_anew(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    owner = Owner(block.address, MIB)
    with survive_memory_errors():
        with pytest.raises(MemoryLostError, match="weight of the head") as raised:
            lose(block.address + PAGE)
        assert raised.value.is_whole
        assert bytes_at(block.address + PAGE, PAGE) == b"\5" * PAGE
        assert session.lost() == ()
        owner.can = False
        with pytest.raises(MemoryLostError, match="write them anew") as raised:
            lose(block.address + PAGE)
        assert not raised.value.is_whole
        assert len(session.lost()) == 1


def test_owner_that_tells_itself_is_not_told_by_others(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    block = session.allocate(MIB, "bind:0")
    owner = Owner(block.address, MIB, itself=True)
    with survive_memory_errors(), caplog.at_level(logging.ERROR):
        lose(block.address + PAGE)
        assert "bytes 4096 to 8191 of weight of the head" in caplog.text
    owner.can = False
    with pytest.raises(MemoryLostError):
        HostCopier().copy(target=block.address, source=block.address + PAGE, nbytes=PAGE)


def test_simulated_memory_fails_alike() -> None:
    session = Session.simulated(load_machine("epyc9354-cxl-a"))
    block = session.allocate(4 * MIB, {0: 1, 2: 1}, strict=False)
    with survive_memory_errors(interrupt=False):
        lose(block.address + 2 * MIB, code=USED)
        (lost,) = session.lost()
        assert lost.node == 2


@pytest.mark.usefixtures("quiet")
def test_pages_that_are_asked_and_whole_are_not_lost(session: Session) -> None:
    block = session.allocate(MIB, "bind:0")
    checked = session.check()
    assert checked.lost == ()
    assert checked.strays == ()
    assert bytes_at(block.address, 8) == bytes(8)


def test_message_counts_what_it_does_not_name() -> None:
    losses = [LostMemory(f"tensor {number}", 0, PAGE, 2, 0) for number in range(6)]
    text = str(MemoryLostError(losses))
    assert "bytes 0 to 4095 of tensor 3 on node 2; and 2 more are lost; write them anew" in text
    assert str(MemoryLostError([], reason="nobody knows")) == "memory failed: nobody knows"
