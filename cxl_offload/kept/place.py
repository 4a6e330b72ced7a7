"""Where a store lies: a file, which its blocks fill, or the beginning of a Device-DAX device.

The two differ in how a store is made, found, read, written back and dropped. What the bytes mean
is the same.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from cxl_offload.kept.device import KeptDevice, find_device, is_device
from cxl_offload.kept.layout import (
    FREE_MARK,
    HEADER_BYTES,
    MARK_BYTES,
    STORE_MARK,
    KeptHeader,
    KeptLayout,
)
from cxl_offload.kept.private_file import make_private, open_private, try_lock
from cxl_offload.memory.shared import shared_free_bytes
from cxl_offload.memory.watched_mapping import WatchedMapping
from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)

Prepare = Callable[[mmap.mmap, bool], None]
"""Gives a mapping its pages, before any of them is used; True: the file is new, and has none."""

Check = Callable[[KeptHeader], None]
"""Raises ValueError where a store is not the one that is wanted."""

Read = Callable[[int, int], bytes]
"""So many bytes from there."""

_ZEROS = bytes(1 << 20)


class KeptPlace(Protocol):
    """What a store asks of where it lies. An open file of it holds the locks."""

    @property
    def path(self) -> Path:
        """Its name."""

    def open(self, flags: int) -> int:
        """Opens what is there, if it is this user's alone; raises OSError."""

    def claim(self, layout: KeptLayout, check: Check) -> tuple[int, KeptHeader | None]:
        """Opens and locks it to write; None: there is no store, or it did not pass the check."""

    def map(
        self, file: int, layout: KeptLayout, *, new: bool, prepare: Prepare | None
    ) -> WatchedMapping:
        """The memory of a store, to write to; room is made for a new one."""

    def map_to_read(self, file: int, layout: KeptLayout) -> WatchedMapping:
        """The memory of a store that another process may write."""

    def making(self, header: bytes, layout: KeptLayout) -> Iterator[tuple[int, bytes]]:
        """What is to be written where, in this order, to make a store."""

    def unmake(self) -> None:
        """After making one failed."""

    def write_back(self, mapping: WatchedMapping, at: int, nbytes: int) -> None:
        """Takes care that what was written is there before what is written later."""

    def flush(self, mapping: WatchedMapping) -> None:
        """Returns when all that was written is on the medium."""

    def problem(self, file: int, layout: KeptLayout) -> str:
        """Why a mapping cannot be read any more; empty: it can."""

    def reading(self, file: int) -> contextlib.AbstractContextManager[tuple[Read, int]]:
        """Reads without believing anything; and how many bytes there are."""

    def header(self, read: Read, nbytes: int) -> KeptHeader:
        """What it says of itself; raises ValueError with what is wrong."""


def place_of(path: str | os.PathLike[str]) -> KeptPlace:
    """Where a store of this path lies; raises OSError where it is a device that is not there."""
    if is_device(path):
        return DevicePlace(find_device(path))
    return FilePlace(Path(path))


class FilePlace:
    """A file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self, flags: int) -> int:
        return open_private(self.path, flags)

    def claim(self, layout: KeptLayout, check: Check) -> tuple[int, KeptHeader | None]:
        while True:
            try:
                file = open_private(self.path, os.O_RDWR)
            except FileNotFoundError:
                try:
                    file = make_private(self.path)
                except FileExistsError:  # another process was quicker
                    continue
            try:
                lock(file, self.path)
                if not os.fstat(file).st_nlink:  # dropped before it was locked
                    os.close(file)
                    continue
                if os.fstat(file).st_size == 0:
                    return file, None
                with self.reading(file) as (read, nbytes):
                    header = self.header(read, nbytes)
                check(header)
                return file, header
            except ValueError as error:
                _logger.warning("dropped the kept blocks in %s: %s", self.path, error)
                # Never changed in place: others may have mapped it.
                self.path.unlink(missing_ok=True)
                os.close(file)
            except BaseException:  # with the file its lock goes
                os.close(file)
                raise

    def map(
        self, file: int, layout: KeptLayout, *, new: bool, prepare: Prepare | None
    ) -> WatchedMapping:
        nbytes = layout.file_bytes
        if new:
            check_room(nbytes, shared_free_bytes(self.path.parent), self.path.parent)
            os.ftruncate(file, nbytes)
        if prepare is None and 512 * os.fstat(file).st_blocks < nbytes:
            os.posix_fallocate(file, 0, nbytes)
        mapping = WatchedMapping(file, nbytes, synced=True, checked=True)
        if prepare is not None:
            with closed_on_error(mapping):
                prepare(mapping, new)
        return mapping

    def map_to_read(self, file: int, layout: KeptLayout) -> WatchedMapping:
        return WatchedMapping(file, layout.file_bytes, writable=False, checked=True)

    def making(self, header: bytes, layout: KeptLayout) -> Iterator[tuple[int, bytes]]:
        yield 0, header  # all else is zeros

    def unmake(self) -> None:
        self.path.unlink(missing_ok=True)

    def write_back(self, mapping: WatchedMapping, at: int, nbytes: int) -> None:
        """The kernel does, in its own order; checksums find what came too late."""

    def flush(self, mapping: WatchedMapping) -> None:
        mapping.flush()
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)

    def problem(self, file: int, layout: KeptLayout) -> str:
        nbytes = os.fstat(file).st_size
        return "" if nbytes >= layout.file_bytes else f"was cut to {nbytes} bytes"

    @contextlib.contextmanager
    def reading(self, file: int) -> Iterator[tuple[Read, int]]:
        # Read, not mapped: a file that is cut meanwhile ends nobody.
        yield (lambda nbytes, at: os.pread(file, nbytes, at)), os.fstat(file).st_size

    def header(self, read: Read, nbytes: int) -> KeptHeader:
        return KeptHeader.unpack(read(HEADER_BYTES, 0), nbytes)


class DevicePlace:
    """The beginning of a Device-DAX device, which has room for one store.

    What was written there stays: bytes of a dropped store, of a pool, of another program. So a
    store is only made where its mark, that of a dropped one, or zeros are.
    """

    def __init__(self, device: KeptDevice) -> None:
        self._device = device

    @property
    def path(self) -> Path:
        return self._device.path

    def open(self, flags: int) -> int:
        return self._device.open(flags)

    def claim(self, layout: KeptLayout, check: Check) -> tuple[int, KeptHeader | None]:
        check_room(layout.file_bytes, self._device.nbytes, self.path)
        file = self.open(os.O_RDWR)
        try:
            lock(file, self.path)
            return file, self._found(file, layout, check)
        except BaseException:
            os.close(file)
            raise

    def _found(self, file: int, layout: KeptLayout, check: Check) -> KeptHeader | None:
        with self.reading(file) as (read, nbytes):
            mark = read(MARK_BYTES, 0)
            if mark == STORE_MARK:
                try:
                    header = self.header(read, nbytes)
                    check(header)
                    return header
                except ValueError as error:
                    _logger.warning("dropped the kept blocks in %s: %s", self.path, error)
                    return None
        if mark != FREE_MARK:
            self._refuse_what_is_there(file, layout)
        return None

    def _refuse_what_is_there(self, file: int, layout: KeptLayout) -> None:
        """All that a store would take has to be zeros; raises FileExistsError."""
        mapping = self.map_to_read(file, layout)
        try:
            for at in range(0, layout.file_bytes, len(_ZEROS)):
                part = mapping[at : min(at + len(_ZEROS), layout.file_bytes)]
                if part != _ZEROS[: len(part)]:
                    raise FileExistsError(errno.EEXIST, FOREIGN, str(self.path))
        finally:
            mapping.close()

    def map(
        self, file: int, layout: KeptLayout, *, new: bool, prepare: Prepare | None
    ) -> WatchedMapping:
        if prepare is not None:
            raise ValueError(f"{self.path}: its pages are where it is, and cannot be placed")
        return self._mapped(file, layout.file_bytes, writable=True)

    def map_to_read(self, file: int, layout: KeptLayout) -> WatchedMapping:
        return self._mapped(file, layout.file_bytes, writable=False)

    def _mapped(self, file: int, nbytes: int, *, writable: bool) -> WatchedMapping:
        device = self._device
        return WatchedMapping(
            file,
            device.rounded(nbytes),
            writable=writable,
            synced=writable,
            page_bytes=device.align_bytes,
            checked=True,
        )

    def making(self, header: bytes, layout: KeptLayout) -> Iterator[tuple[int, bytes]]:
        # A mark is one word, written at once. Ended anywhere in between, this is a dropped store or
        # one whose header is damaged, and made anew by the next one.
        yield 0, FREE_MARK
        end = layout.entry_at(layout.slots)
        for at in range(HEADER_BYTES, end, len(_ZEROS)):
            yield at, _ZEROS[: end - at]
        yield 0, header.ljust(HEADER_BYTES, b"\0")

    def unmake(self) -> None:
        """It stays as a dropped one."""

    def write_back(self, mapping: WatchedMapping, at: int, nbytes: int) -> None:
        mapping.write_back(at, nbytes)

    def flush(self, mapping: WatchedMapping) -> None:
        """Every change was written back when it was made."""

    def problem(self, file: int, layout: KeptLayout) -> str:
        return ""

    @contextlib.contextmanager
    def reading(self, file: int) -> Iterator[tuple[Read, int]]:
        nbytes = self._device.nbytes
        mapping = self._mapped(file, nbytes, writable=False)
        try:
            yield (lambda count, at: mapping[at : at + count]), nbytes
        finally:
            mapping.close()

    def header(self, read: Read, nbytes: int) -> KeptHeader:
        return KeptHeader.unpack(read(HEADER_BYTES, 0), nbytes, exact=False)

    def has_store(self) -> bool:
        """Whether the mark of a store is there."""
        file = self.open(os.O_RDONLY)
        try:
            with self.reading(file) as (read, _):
                return read(MARK_BYTES, 0) == STORE_MARK
        finally:
            os.close(file)

    def free(self, *, force: bool) -> int:
        """Drops the store; returns the bytes that it took. Their contents stay.

        Raises
        ------
        BlockingIOError
            A process writes it.
        FileExistsError
            Something else is there, and ``force`` does not say that it may go.
        """
        file = self.open(os.O_RDWR)
        try:
            lock(file, self.path, remedy="; stop that one first")
            with self.reading(file) as (read, nbytes):
                mark, taken = read(MARK_BYTES, 0), 0
                if mark not in (STORE_MARK, FREE_MARK) and not force:
                    if read(HEADER_BYTES, 0) == bytes(HEADER_BYTES):
                        return 0
                    raise FileExistsError(errno.EEXIST, FOREIGN, str(self.path))
                with contextlib.suppress(ValueError):
                    taken = self.header(read, nbytes).layout.file_bytes
            mapping = self._mapped(file, HEADER_BYTES, writable=True)
            try:
                for at, data in ((0, FREE_MARK), (MARK_BYTES, bytes(HEADER_BYTES - MARK_BYTES))):
                    mapping[at : at + len(data)] = data
                    mapping.write_back(at, len(data))
            finally:
                mapping.close()
            return taken
        finally:
            os.close(file)


FOREIGN = (
    "it holds something that is no store; `cxl-offload kv drop --force` with its name gives that up"
)


def lock(file: int, path: Path, *, remedy: str = "") -> None:
    """Takes the lock of the writer; raises BlockingIOError where another process has it."""
    if not try_lock(file):
        raise BlockingIOError(errno.EAGAIN, f"another process writes this store{remedy}", str(path))


def check_room(nbytes: int, free: int, where: Path) -> None:
    """Raises MemoryError where a place has less than a store needs."""
    if nbytes > free:
        raise MemoryError(
            f"keep {format_bytes(nbytes)} in {where}: it has {format_bytes(free)} left; ask for "
            "less, or mount it larger"
        )


@contextlib.contextmanager
def closed_on_error(mapping: mmap.mmap) -> Iterator[None]:
    """Closes a mapping where the block fails."""
    try:
        yield
    except BaseException:
        mapping.close()
        raise
