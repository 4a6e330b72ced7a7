"""Parts of files, read into host memory by several threads: from the page cache, or past it.

What the page cache has is copied from there at the speed of a copy. The rest is read past it, at
the speed of the drive and without pushing other memory out of the near node.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import numpy as np

_PIECE_BYTES = 4 << 20  # one call: enough for a drive to work on many blocks at once
_BUFFER_BYTES = _PIECE_BYTES + mmap.PAGESIZE  # a piece may begin inside of a page
_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL)
"""What says that a file system has no reads past the page cache."""
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes ``offset`` to ``offset + nbytes`` of a file."""

    path: str
    inode: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReadBytes:
    """Where the bytes of a part came from; both are counted once."""

    cached: int
    from_drive: int


def read_file_part(part: FilePart, *, target: int) -> ReadBytes:
    """Fill host memory with a part of a file.

    What the page cache has is copied from there. The rest is read past it (``O_DIRECT``) where the
    file system can, so that the page cache does not grow. As many threads work as this process has
    CPUs.

    Parameters
    ----------
    part
        Of a file that stays as it is meanwhile.
    target
        Address of ``part.nbytes`` bytes that nobody else uses; the caller keeps them alive.

    Raises
    ------
    OSError
        The file cannot be read, is another one now, or ends before the part does; what the target
        holds is not defined then.
    """
    pieces = range(0, part.nbytes, _PIECE_BYTES)
    with ExitStack() as held:
        reader = held.enter_context(_reader(part))

        def read(at: int) -> int:
            return reader.fill(target + at, part.offset + at, min(_PIECE_BYTES, part.nbytes - at))

        threads = min(len(os.sched_getaffinity(0)), len(pieces))
        if threads > 1:
            pool = held.enter_context(ThreadPoolExecutor(threads))
            cached = sum(pool.map(read, pieces))
        else:
            cached = sum(map(read, pieces))
    return ReadBytes(cached, part.nbytes - cached)


@contextmanager
def _reader(part: FilePart) -> Iterator[_Reader]:
    with ExitStack() as held:
        plain = os.open(part.path, os.O_RDONLY | os.O_CLOEXEC)
        held.callback(os.close, plain)
        found = os.fstat(plain)
        if found.st_ino != part.inode:
            raise OSError(errno.ESTALE, "another file is there now; load it again", part.path)
        if found.st_size < part.offset + part.nbytes:
            raise _too_short(part, found.st_size)
        direct = None
        with suppress(OSError):  # a file system without reads past its cache
            direct = os.open(part.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            held.callback(os.close, direct)
        mapped = mmap.mmap(plain, 0, prot=mmap.PROT_READ)  # for its pages' states alone
        yield _Reader(part, plain, direct, mapped)


def _too_short(part: FilePart, end: int) -> OSError:
    wanted = part.offset + part.nbytes
    said = (
        f"the file ends at byte {end} now, and had {wanted} or more when it was mapped; load it "
        "again when nobody writes to it"
    )
    return OSError(errno.EIO, said, part.path)


class _Reader:
    """One file, open in both ways; its threads share it."""

    def __init__(self, part: FilePart, plain: int, direct: int | None, mapped: mmap.mmap) -> None:
        self._part = part
        self._plain = plain
        self._direct = direct
        self._mapped = np.frombuffer(mapped, np.uint8)
        self._buffers: list[mmap.mmap] = []  # those that no thread uses now

    def fill(self, target: int, offset: int, nbytes: int) -> int:
        """Fill one piece; how many bytes of it the page cache had: all or, as it counts, none."""
        if self._direct is None or self._is_cached(offset, nbytes):
            self._through_cache(target, offset, nbytes)
            return nbytes
        self._from_drive(self._direct, target, offset, nbytes)
        return 0

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Asked from the kernel, which says yes of a file that is not the user's."""
        begin, end = _whole_pages(offset, nbytes)
        resident = np.zeros((end - begin) // mmap.PAGESIZE, np.uint8)
        refused = _LIBC.mincore(
            ctypes.c_void_p(self._mapped.ctypes.data + begin),
            ctypes.c_size_t(end - begin),
            ctypes.c_void_p(resident.ctypes.data),
        )
        return bool(refused) or bool((resident & 1).all())

    def _from_drive(self, direct: int, target: int, offset: int, nbytes: int) -> None:
        """Whole pages go through a buffer: a part rarely begins where a block of the drive does."""
        begin, end = _whole_pages(offset, nbytes)
        buffer = self._buffers.pop() if self._buffers else mmap.mmap(-1, _BUFFER_BYTES)
        try:
            with memoryview(buffer)[: end - begin] as pages:
                read = self._read_pages(direct, pages, begin)
                if begin + read < offset + nbytes:
                    raise _too_short(self._part, begin + read)
                with pages[offset - begin :][:nbytes] as wanted:
                    _copy(target, wanted)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._through_cache(target, offset, nbytes)
        finally:
            self._buffers.append(buffer)

    def _read_pages(self, direct: int, pages: memoryview, begin: int) -> int:
        """As many bytes as the file has, up to all of ``pages``."""
        read = 0
        while read < len(pages):
            try:
                count = os.preadv(direct, [pages[read:]], begin + read)
            except OSError as error:
                raise self._failed(error) from error
            read += count
            if count % mmap.PAGESIZE or not count:
                break
        return read

    def _through_cache(self, target: int, offset: int, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                part = (ctypes.c_char * (nbytes - done)).from_address(target + done)
                count = os.preadv(self._plain, [part], offset + done)
            except OSError as error:
                raise self._failed(error) from error
            if count == 0:
                raise _too_short(self._part, offset + done)
            done += count

    def _failed(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, self._part.path)


def _whole_pages(offset: int, nbytes: int) -> tuple[int, int]:
    """Where the first page of a range begins and its last one ends."""
    begin = offset - offset % mmap.PAGESIZE
    return begin, -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE


def _copy(target: int, source: memoryview) -> None:
    """Without the interpreter's lock, which `memmove` of ctypes gives back."""
    held = (ctypes.c_char * len(source)).from_buffer(source)
    try:
        ctypes.memmove(target, ctypes.addressof(held), len(source))
    finally:
        del held
