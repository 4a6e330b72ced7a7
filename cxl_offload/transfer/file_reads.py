"""Parts of files, read into host memory by several threads: from the page cache, or past it.

What the page cache has is copied from there at the speed of a copy. The rest is read past it, at
the speed of the drive and without pushing other memory out of the near node.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType

import numpy as np

_PIECE_BYTES = 4 << 20  # one call: enough for a drive to work on many blocks at once
_END_BYTES = 3 * mmap.PAGESIZE  # of a piece that begins inside of a page, there and here
_FEWEST_THREADS = 4  # a drive answers several reads sooner than one after another
_MOST_THREADS = 32  # a bound for machines of hundreds of CPUs; chosen, not measured
_MOST_PARTS = 32  # under way at once: each has its file open
_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.EFAULT)
"""What says that a file system has no reads past the page cache, or none into such memory."""
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


@dataclass(slots=True)
class _Started:
    """A part on its way: its file is open, and its target held, until all pieces are there."""

    part: FilePart
    reader: _Reader
    pieces: list[Future[int]]
    opened: ExitStack
    done: Callable[[], None]


class FileReads:
    """Parts of files that threads read into host memory while the caller does something else.

    What the page cache has is copied from there. The rest is read past it (``O_DIRECT``) where the
    file system can, so that the page cache does not grow. Used in a ``with`` block of one thread:
    when it ends, for whatever reason, no thread reads any more, and what was not waited for is
    not defined.

    Parameters
    ----------
    timed
        A block around each piece that a thread reads.
    """

    def __init__(self, timed: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        threads = min(max(len(os.sched_getaffinity(0)), _FEWEST_THREADS), _MOST_THREADS)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="file reads")
        self._started: deque[_Started] = deque()
        self._ends: list[mmap.mmap] = []  # memory that no thread uses now
        self._timed = timed
        self._cached = self._from_drive = 0

    def __enter__(self) -> FileReads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        while self._started:
            self._started.popleft().opened.close()

    def start(
        self, part: FilePart, *, target: int, done: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to fill host memory with a part of a file.

        Parameters
        ----------
        part
            Of a file that stays as it is meanwhile.
        target
            Address of ``part.nbytes`` bytes that nobody else uses until ``done`` was called, or the
            ``with`` block has ended.
        done
            Is called when all bytes are there, by the thread that starts or waits. What it refers
            to lives until then.

        Raises
        ------
        OSError
            This file, or that of a part that was started before, cannot be read, is another one
            now, or ends before the part does.
        """
        while self._started and (len(self._started) >= _MOST_PARTS or self._first_is_there()):
            self._finish_first()
        with ExitStack() as held:
            reader = held.enter_context(_reader(part, self._ends))
            started = _Started(part, reader, [], held.pop_all(), done)
        self._started.append(started)
        for at in range(0, part.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, part.nbytes - at)
            piece = self._pool.submit(self._fill, started, target + at, part.offset + at, nbytes)
            started.pieces.append(piece)

    def wait(self) -> ReadBytes:
        """Return when all that was started is there: what came from where since the block began.

        Raises
        ------
        OSError
            As :meth:`start`.
        """
        while self._started:
            self._finish_first()
        return ReadBytes(self._cached, self._from_drive)

    def _fill(self, started: _Started, target: int, offset: int, nbytes: int) -> int:
        with self._timed():
            return started.reader.fill(target, offset, nbytes)

    def _first_is_there(self) -> bool:
        return all(piece.done() for piece in self._started[0].pieces)

    def _finish_first(self) -> None:
        first = self._started[0]
        cached = sum(piece.result() for piece in first.pieces)
        self._cached += cached
        self._from_drive += first.part.nbytes - cached
        self._started.popleft()
        first.opened.close()
        first.done()


@contextmanager
def _reader(part: FilePart, ends: list[mmap.mmap]) -> Iterator[_Reader]:
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
        yield _Reader(part, plain, direct, mapped, ends)


def _too_short(part: FilePart, end: int) -> OSError:
    wanted = part.offset + part.nbytes
    said = (
        f"the file ends at byte {end} now, and had {wanted} or more when it was mapped; load it "
        "again when nobody writes to it"
    )
    return OSError(errno.EIO, said, part.path)


class _Reader:
    """One file, open in both ways; its threads share it."""

    def __init__(
        self,
        part: FilePart,
        plain: int,
        direct: int | None,
        mapped: mmap.mmap,
        ends: list[mmap.mmap],
    ) -> None:
        self._part = part
        self._plain = plain
        self._direct = direct
        self._mapped = np.frombuffer(mapped, np.uint8)
        self._ends = ends

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
        """Whole pages of the file go to whole pages of the target, and are moved within it.

        A part rarely begins where a page does, so the first page is read too, and everything lies
        further back than it should. What is then past the target's last whole page goes elsewhere.
        Memory of a few MiB for all of it is no faster: a drive that writes to the same memory again
        and again took twice as long as one that writes to memory of its own (virtio, Linux 6.18).
        """
        begin, end = _whole_pages(offset, nbytes)
        ahead, aligned = offset - begin, _whole_pages(target, 0)[1]
        inside = max(target + nbytes - aligned, 0) // mmap.PAGESIZE * mmap.PAGESIZE
        inside = inside if inside > ahead else 0
        past = self._ends.pop() if self._ends else mmap.mmap(-1, _END_BYTES)
        try:
            with _memory_at(aligned, inside) as here, memoryview(past) as there:
                read = self._read_pages(direct, [here, there[: end - begin - inside]], begin)
                if begin + read < offset + nbytes:
                    raise _too_short(self._part, begin + read)
                here_bytes = max(inside - ahead, 0)
                ctypes.memmove(target, aligned + ahead, here_bytes)
                with there[ahead - inside + here_bytes :][: nbytes - here_bytes] as rest:
                    _copy(target + here_bytes, rest)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            self._through_cache(target, offset, nbytes)
        finally:
            self._ends.append(past)

    def _read_pages(self, direct: int, parts: list[memoryview], begin: int) -> int:
        """As many bytes as the file has, up to all of ``parts``, one after another."""
        wanted, read = sum(map(len, parts)), 0
        while read < wanted:
            first = max(read - len(parts[0]), 0)
            try:
                count = os.preadv(direct, [parts[0][read:], parts[1][first:]], begin + read)
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
                with _memory_at(target + done, nbytes - done) as part:
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


def _memory_at(address: int, nbytes: int) -> memoryview:
    """Bytes of this process that the caller keeps alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def _copy(target: int, source: memoryview) -> None:
    """Without the interpreter's lock, which `memmove` of ctypes gives back."""
    held = (ctypes.c_char * len(source)).from_buffer(source)
    try:
        ctypes.memmove(target, ctypes.addressof(held), len(source))
    finally:
        del held
