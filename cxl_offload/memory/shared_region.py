"""Memory that several processes map together, placed by a policy before anybody uses it.

The processes need to agree on the name only: the first one makes the file in
``/dev/shm``, sizes it and puts its pages where the policy says, while the others wait. When as many
have mapped it as were announced, the name is removed, so that the memory goes with the last of
them, however it ends. What a program that was killed before that left behind is removed by the
next one that starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cxl_offload import _C
from cxl_offload.memory.bounds import quoted, whole_number
from cxl_offload.memory.in_use import current_session
from cxl_offload.memory.placement import Placement
from cxl_offload.memory.policy import PolicyLike, as_policy, refuse_copies
from cxl_offload.memory.session import Session
from cxl_offload.memory.shared import SHARED_ROOT, open_regular, shared_free_bytes
from cxl_offload.memory.watched_mapping import WatchedMapping
from cxl_offload.renamed import renamed_keywords
from cxl_offload.topology.node import Pages
from cxl_offload.units import format_bytes

_logger = logging.getLogger(__name__)

_SHMEM_HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of linux/mman.h, which Python does not name."""

_PREFIX = "cxl_offload_kv_"
LONGEST_NAME = 200
"""Bytes; with prefix and suffix a file's name may have 255."""

# The last page of a file: how long the region is, whether it was placed, how many have mapped it.
_TALLY = struct.Struct("<QII")


def _lock(file: int, kind: int) -> None:
    """Locks the file against other openings of it, also of this process; waits for them."""
    # struct flock of 64-bit Linux: type, whence, start, length (0: all), pid
    fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


@contextlib.contextmanager
def _locked(file: int) -> Iterator[None]:
    _lock(file, fcntl.F_WRLCK)
    try:
        yield
    finally:
        _lock(file, fcntl.F_UNLCK)


def remove_leftovers(root: str | os.PathLike[str] = SHARED_ROOT) -> tuple[Path, ...]:
    """Removes the regions of ended processes of this user, and says so in the log.

    A region that is being made at the same moment is not lost: its maker sees that its name is
    gone, and begins again.
    """
    removed = []
    for path in sorted(Path(root).glob(f"{_PREFIX}*.mmap")):
        try:
            file = open_regular(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            state = os.fstat(file)
            if state.st_nlink and state.st_uid == os.geteuid():
                path.unlink()
                removed.append(path)
                _logger.warning(
                    "removed %s: an ended process had left %s in it",
                    path,
                    format_bytes(512 * state.st_blocks),
                )
        except OSError:
            continue
        finally:
            os.close(file)
    return tuple(removed)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name {quoted(name)} is no text")
    if not 0 < len(name.encode()) <= LONGEST_NAME or "/" in name or not name.isprintable():
        raise ValueError(
            f"name {quoted(name)} of a shared region: 1 to {LONGEST_NAME} bytes of characters "
            "that can be printed, without a slash"
        )


class SharedRegion:
    """One range of shared memory, mapped in this process.

    Parameters
    ----------
    name
        What the processes call it; letters, digits, ``-``, ``_`` and ``.``.
    nbytes
        Whole pages. The same in every process.
    policy
        Where the pages of the whole region go; the first process puts them there. None leaves
        that to :meth:`place`.
    mappers
        How many will map it; the name is removed when the last has.
    pages
        ``"base"``, or ``"thp"`` where the kernel gives huge pages to shared memory
        (``/sys/kernel/mm/transparent_hugepage/shmem_enabled``).
    session
        What places; None takes the current one.

    Raises
    ------
    MemoryError
        ``/dev/shm`` or a node has no room.
    ValueError
        Another process made it with another size, or a bad policy.
    """

    @renamed_keywords(placement="policy", memory="session")
    def __init__(
        self,
        name: str,
        nbytes: int,
        policy: PolicyLike | None = None,
        *,
        mappers: int = 1,
        pages: Pages = "base",
        session: Session | None = None,
        root: str | os.PathLike[str] = SHARED_ROOT,
    ) -> None:
        _check_name(name)
        if whole_number(nbytes, "nbytes") < 1 or nbytes % mmap.PAGESIZE:
            raise ValueError(f"share {nbytes} bytes: not whole pages of {mmap.PAGESIZE}")
        if pages not in ("base", "thp"):
            raise ValueError(f"pages {quoted(pages)}: shared memory has base and thp")
        self.path = Path(root) / f"{_PREFIX}{name}.mmap"
        self.nbytes = nbytes
        self.notes: tuple[str, ...] = ()
        self._session = session or current_session()
        self._pages: Pages = pages
        self._guard = _C.ForkGuard()
        remove_leftovers(root)
        self.file = self._open()
        try:
            with _locked(self.file):
                is_first = self._size()
                self.mapping = WatchedMapping(self.file, nbytes + mmap.PAGESIZE)
                self._advise()
                is_placed, count = self._tally()
                if policy is not None:
                    self._map_pages() if is_placed else self.place(policy)
                if is_first:
                    _logger.info("made %s of %s", self.path, format_bytes(nbytes))
                _TALLY.pack_into(self.mapping, nbytes, nbytes, 1, count + 1)
                if count + 1 >= mappers:
                    self.path.unlink(missing_ok=True)
        except BaseException:
            self._abandon()
            raise

    def _open(self) -> int:
        """The file, held by a lock that says that somebody lives who uses it."""
        while True:
            file = open_regular(self.path, os.O_RDWR | os.O_CREAT)
            owner = os.fstat(file).st_uid
            if owner != os.geteuid():  # asked first: a lock of theirs could be held for ever
                os.close(file)
                raise PermissionError(f"map {self.path}: it belongs to user {owner}")
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file).st_nlink:
                return file
            os.close(file)

    def _size(self) -> bool:
        """Gives the file its length; whether that was still to be done."""
        wanted = self.nbytes + mmap.PAGESIZE
        found = os.fstat(self.file).st_size
        if found not in (0, wanted):
            raise ValueError(
                f"map {self.path}: another process made it for {found - mmap.PAGESIZE} bytes, "
                f"this one asks for {self.nbytes}"
            )
        if found == wanted:
            return False
        free = shared_free_bytes(self.path.parent)
        if wanted > free:
            raise MemoryError(
                f"share {format_bytes(self.nbytes)}: {self.path.parent} has {format_bytes(free)} "
                "left; ask for less, or mount it larger (in a container: --shm-size)"
            )
        os.ftruncate(self.file, wanted)
        return True

    def _advise(self) -> None:
        # Base pages are asked for too: a huge one would hold more than a small granule.
        advice = mmap.MADV_HUGEPAGE if self._pages == "thp" else mmap.MADV_NOHUGEPAGE
        with contextlib.suppress(OSError):  # a kernel built without them has base pages only
            self.mapping.madvise(advice)
        if self._pages == "thp":
            text = _SHMEM_HUGE.read_text() if _SHMEM_HUGE.exists() else "[never]"
            if "[never]" in text or "[deny]" in text:
                self.notes += (f"base pages, not huge ones: write advise to {_SHMEM_HUGE}",)

    def _map_pages(self) -> None:
        """Maps the pages that are there into this process; moves none of them."""
        with contextlib.suppress(OSError):  # kernels before 5.14; then each at its first use
            self.mapping.madvise(_POPULATE_WRITE, 0, self.nbytes)

    def _tally(self) -> tuple[bool, int]:
        _, placed, count = _TALLY.unpack_from(self.mapping, self.nbytes)
        return bool(placed), count

    def _abandon(self) -> None:
        # The last who leaves an unfinished region takes it along.
        with contextlib.suppress(OSError):
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path.unlink(missing_ok=True)
        mapping = getattr(self, "mapping", None)
        if mapping is not None:
            mapping.close()
        os.close(self.file)

    @property
    def address(self) -> int:
        """Of the first byte, in this process."""
        return int(np.frombuffer(self.mapping, dtype=np.uint8, count=1).ctypes.data)

    @renamed_keywords(placement="policy")
    def place(
        self,
        policy: PolicyLike,
        *,
        offset: int = 0,
        part_bytes: int | None = None,
        stride_bytes: int | None = None,
        count: int = 1,
    ) -> None:
        """Faults pages in where ``policy`` says; pages that are there already are moved.

        Parameters
        ----------
        offset, part_bytes, stride_bytes, count
            ``count`` parts, laid out as if they were one range; all by default the whole region.
        """
        part = self.nbytes - offset if part_bytes is None else part_bytes
        if stride_bytes == part:  # one range, which several threads may fault in
            part, stride_bytes, count = part * count, None, 1
        refuse_copies(as_policy(policy, self._session.machine), "a shared region")
        notes = self._session.place(
            self.address + offset,
            self.nbytes - offset,
            policy,
            part_bytes=part,
            stride_bytes=part if stride_bytes is None else stride_bytes,
            count=count,
            pages=self._pages,
        )
        self.notes += notes

    def placement(self) -> Placement:
        """Where the pages are, by asking them."""
        return self._session.placement(self.address, self.nbytes)

    def close(self) -> None:
        """Unmaps; the memory goes when the last process has.

        A forked child, which inherits the mapping, unmaps its own only.

        Raises
        ------
        BufferError
            An array or tensor still views the memory.
        """
        if self.file < 0:
            return
        self.mapping.close()
        file, self.file = self.file, -1
        if self._guard.in_child:  # the lock is one with the parent's, and so is the name
            os.close(file)
            return
        with contextlib.suppress(OSError):  # others hold it: theirs is the name to remove
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file).st_nlink:
                self.path.unlink(missing_ok=True)
        os.close(file)
