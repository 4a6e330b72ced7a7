"""Parts of mapped files, read past their mapping: the bytes of the file, or nothing at all."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cxl_offload.transfer import mapped_files
from cxl_offload.transfer.file_reads import FilePart, FileReads, ReadBytes
from cxl_offload.transfer.mapped_files import file_part_at

KERNEL = tuple(map(int, platform.release().split(".")[:2]))
FILE_BYTES = (9 << 20) + 1234
"""Two pieces and a part of one, with an end inside of a page."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights of a model"
    path.write_bytes(random.Random(0).randbytes(FILE_BYTES))
    return path


@contextmanager
def mapped(path: Path) -> Iterator[tuple[mmap.mmap, int]]:
    """A private mapping that may be written to, as safetensors makes it, and its address."""
    with path.open("rb") as file:
        held = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3)
    view = ctypes.c_char.from_buffer(held)
    address = ctypes.addressof(view)
    del view
    try:
        yield held, address
    finally:
        held.close()


def read(part: FilePart, past_page: int = 1) -> tuple[bytes, ReadBytes]:
    """A part in memory that begins some bytes past a page's first, with others around it."""
    around = mmap.PAGESIZE
    target = mmap.mmap(-1, part.nbytes + past_page + 2 * around)
    target[:] = b"\xa5" * len(target)
    begin, end = around + past_page, around + past_page + part.nbytes
    held = ctypes.c_char.from_buffer(target)
    with FileReads() as reads:
        reads.start(part, target=ctypes.addressof(held) + begin)
        found = reads.wait()
    del held
    assert {*target[:begin], *target[end:]} == {0xA5}, "bytes beside the target were written"
    return target[begin:end], found


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_any_part_of_a_mapped_file_is_read_as_the_file_has_it(
    file: Path, cached: bool, seed: int
) -> None:
    numbers = random.Random(seed)
    begin = numbers.randrange(FILE_BYTES)
    nbytes = FILE_BYTES - begin if not seed else numbers.randrange(1, FILE_BYTES - begin + 1)
    if not cached:
        drop_from_cache(file)
    with mapped(file) as (_, address):
        part = file_part_at(address + begin, nbytes)
    assert part is not None
    assert (part.path, part.offset, part.nbytes) == (str(file), begin, nbytes)
    got, found = read(part)
    assert got == file.read_bytes()[begin : begin + nbytes]
    assert found.cached + found.from_drive == nbytes


def test_what_the_page_cache_has_comes_from_there_and_the_rest_from_the_drive(file: Path) -> None:
    whole = FilePart(str(file), file.stat().st_ino, 0, FILE_BYTES)
    file.read_bytes()
    assert read(whole)[1].from_drive == 0
    drop_from_cache(file)
    first = read(whole)[1]
    if first.from_drive == 0:
        pytest.skip("this file system keeps its files in memory")
    assert read(whole)[1].from_drive == FILE_BYTES, "reading filled the page cache"


def test_memory_that_was_written_to_is_not_that_of_its_file(file: Path) -> None:
    with mapped(file) as (held, address):
        held[mmap.PAGESIZE * 3] = (held[mmap.PAGESIZE * 3] + 1) % 256
        assert file_part_at(address, FILE_BYTES) is None
        assert file_part_at(address + 3 * mmap.PAGESIZE, 1) is None
        assert file_part_at(address, 3 * mmap.PAGESIZE) is not None


def test_memory_without_a_file_or_past_its_mapping_has_no_part(file: Path) -> None:
    with mmap.mmap(-1, 1 << 20) as anonymous:
        anonymous[0] = 1
        view = ctypes.c_char.from_buffer(anonymous)
        assert file_part_at(ctypes.addressof(view), 1 << 20) is None
        del view
    with mapped(file) as (_, address):
        assert file_part_at(address, FILE_BYTES + mmap.PAGESIZE) is None
    assert file_part_at(0, 1) is None


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_file_that_is_another_one_now_is_not_read(file: Path, how: str) -> None:
    with mapped(file) as (_, address):
        if how == "removed":
            file.unlink()
        else:
            other = file.with_name("other")
            other.write_bytes(bytes(FILE_BYTES))
            other.replace(file)
        assert file_part_at(address, FILE_BYTES) is None


def test_file_replaced_after_its_part_was_found_is_refused(file: Path) -> None:
    part = FilePart(str(file), file.stat().st_ino, 0, FILE_BYTES)
    other = file.with_name("other")
    other.write_bytes(bytes(FILE_BYTES))
    other.replace(file)
    with pytest.raises(OSError, match="another file is there now") as caught:
        read(part)
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("left", [5 << 20, (5 << 20) + 77, 0])
def test_file_that_became_shorter_is_refused_with_its_end(
    file: Path, left: int, cached: bool
) -> None:
    part = FilePart(str(file), file.stat().st_ino, 100, FILE_BYTES - 100)
    os.truncate(file, left)
    if not cached:
        drop_from_cache(file)
    with pytest.raises(
        OSError, match=r"the file ends at byte \d+ now, and had \d+ or more when it was mapped"
    ):
        read(part)


@pytest.mark.parametrize(
    ("refuses", "why"),
    [("open", errno.EINVAL), ("read", errno.EINVAL), ("read", errno.EFAULT)],
)
def test_file_system_without_reads_past_its_cache_is_read_through_it(
    file: Path, refuses: str, why: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_preadv = os.open, os.preadv
    direct: list[int] = []

    def open_(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(why, os.strerror(why))
        opened = real_open(path, flags, *rest)
        if flags & os.O_DIRECT:
            direct.append(opened)
        return opened

    def preadv(fd: int, buffers: list[object], offset: int) -> int:
        if fd in direct:
            raise OSError(why, os.strerror(why))
        return real_preadv(fd, buffers, offset)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    drop_from_cache(file)
    part = FilePart(str(file), file.stat().st_ino, 4097, FILE_BYTES - 5000)
    assert read(part)[0] == file.read_bytes()[4097:-903]


def test_both_ways_to_ask_for_a_mapping_agree(file: Path) -> None:
    with mapped(file) as (_, address), Path("/proc/self/maps").open("rb", buffering=0) as maps:
        listed = mapped_files._listed_mapping(maps.readall(), address + 5000)
        assert listed is not None
        assert listed[2:] == (0, file.stat().st_ino, str(file))
        if KERNEL < (6, 11):
            with pytest.raises(OSError, match="Inappropriate ioctl"):
                mapped_files._asked_mapping(maps.fileno(), address + 5000)
        else:
            assert mapped_files._asked_mapping(maps.fileno(), address + 5000) == listed
