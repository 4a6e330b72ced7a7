"""Reads of several parts of files at once, past the page cache: bytes, errors, and what is left."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cxl_offload.transfer import file_reads
from cxl_offload.transfer.file_reads import FilePart, FileReads

from .test_mapped_files import drop_from_cache, read

PAGE = mmap.PAGESIZE
FILE_BYTES = (9 << 20) + 1234
PATIENCE_S = 30


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "weights"
    path.write_bytes(random.Random(1).randbytes(FILE_BYTES))
    return path


class Memory:
    """Bytes that know where they are, and can be watched."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = bytearray(nbytes)
        self._held = (ctypes.c_char * nbytes).from_buffer(self.bytes)
        self.address = ctypes.addressof(self._held)


def part_of(file: Path, offset: int, nbytes: int) -> FilePart:
    return FilePart(str(file), file.stat().st_ino, offset, nbytes)


@pytest.fixture
def left() -> Iterator[None]:
    """Says whether a test leaves files open or threads behind."""

    def seen() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = seen()
    yield
    assert seen() == before


@pytest.mark.parametrize("past_page", [0, 8, 512, PAGE - 1])
@pytest.mark.parametrize("offset", [0, 8, 512, PAGE - 8, 5 * PAGE + 1000])
@pytest.mark.parametrize("nbytes", [1, PAGE - 9, PAGE, 2 * PAGE + 1, 5 * PAGE, (4 << 20) + 77])
def test_bytes_of_the_drive_come_to_any_place(
    file: Path, past_page: int, offset: int, nbytes: int
) -> None:
    drop_from_cache(file)
    got, _ = read(part_of(file, offset, nbytes), past_page)
    assert got == file.read_bytes()[offset : offset + nbytes]


def test_end_of_a_file_comes_from_the_drive(file: Path) -> None:
    for nbytes in (1, 1234, 1235, PAGE + 1234):
        drop_from_cache(file)
        got, _ = read(part_of(file, FILE_BYTES - nbytes, nbytes))
        assert got == file.read_bytes()[-nbytes:]


@pytest.mark.parametrize("cached", [True, False])
def test_more_parts_than_are_under_way_at_once_are_all_read(
    file: Path, cached: bool, left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reads, "_MOST_PARTS", 3)
    if not cached:
        drop_from_cache(file)
    numbers, done = random.Random(2), list[int]()
    with FileReads() as reads:
        parts = []
        for at in range(10):
            offset = numbers.randrange(FILE_BYTES - 1)
            part = part_of(file, offset, numbers.randrange(1, FILE_BYTES - offset))
            memory = Memory(part.nbytes)
            parts.append((part, memory))
            reads.start(part, target=memory.address, done=lambda at=at: done.append(at))
            assert len(reads._started) <= 3
        found = reads.wait()
    assert done == list(range(10))
    assert found.cached + found.from_drive == sum(part.nbytes for part, _ in parts)
    whole = file.read_bytes()
    for part, memory in parts:
        assert memory.bytes == whole[part.offset : part.offset + part.nbytes]


def failing(
    monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException, held: threading.Event
) -> None:
    """Reads of a file fail from a position on; others wait until they may go on."""
    preadv = os.preadv

    def read_(number: int, buffers: Any, offset: int) -> int:
        if offset >= at:
            raise error
        assert held.wait(PATIENCE_S)
        return preadv(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", read_)


@pytest.mark.parametrize("next_call", ["wait", "start"])
def test_error_of_a_thread_reaches_who_waits_or_starts_the_next(
    file: Path, next_call: str, left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    held.set()
    failing(monkeypatch, 4 << 20, OSError(errno.EIO, "Input/output error"), held)
    monkeypatch.setattr(file_reads, "_MOST_PARTS", 1)
    memory, whole = Memory(FILE_BYTES), part_of(file, 0, FILE_BYTES)

    def go_on(reads: FileReads) -> None:
        with reads:
            reads.start(whole, target=memory.address)
            if next_call == "start":
                reads.start(part_of(file, 0, 1), target=memory.address)
            else:
                reads.wait()

    with pytest.raises(OSError, match="Input/output error") as caught:
        go_on(FileReads())
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(file))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_block_that_is_left_early_waits_for_reads_under_way_and_begins_no_others(
    file: Path, error: type[BaseException], left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, memory = threading.Event(), Memory(FILE_BYTES)
    begun: list[int] = []
    fill = file_reads._Reader.fill

    def counted(reader: Any, target: int, offset: int, nbytes: int) -> int:
        begun.append(offset)
        assert held.wait(PATIENCE_S)
        return fill(reader, target, offset, nbytes)

    monkeypatch.setattr(file_reads._Reader, "fill", counted)
    monkeypatch.setattr(file_reads, "_PIECE_BYTES", 64 << 10)
    later = threading.Timer(0.1, held.set)
    watched, done, reads = weakref.ref(memory), list[int](), FileReads()
    started = {"target": memory.address, "done": lambda kept=memory: done.append(kept.address)}
    del memory

    def leave() -> None:
        with reads:
            reads.start(part_of(file, 0, FILE_BYTES), **started)
            started.clear()
            gc.collect()
            assert watched() is not None, "memory is read into, and nobody keeps it"
            later.start()
            raise error

    with pytest.raises(error):
        leave()
    later.join()
    assert not done
    assert 0 < len(begun) <= reads._pool._max_workers
    gc.collect()
    assert watched() is None


def test_pieces_are_timed_while_the_caller_does_something_else(file: Path) -> None:
    going, counted = threading.Event(), []

    class Timed:
        def __enter__(self) -> None:
            counted.append(threading.current_thread())
            assert going.wait(PATIENCE_S)

        def __exit__(self, *_: object) -> None:
            pass

    memory = Memory(FILE_BYTES)
    with FileReads(Timed) as reads:
        reads.start(part_of(file, 0, FILE_BYTES), target=memory.address)
        going.set()  # the caller came here before anything was read
        reads.wait()
    assert len(counted) == 3
    assert threading.current_thread() not in counted
    assert memory.bytes == file.read_bytes()
