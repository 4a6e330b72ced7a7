"""Mappings of files in memory whose lost pages are survived as those of allocations are."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

from cxl_offload import _C
from cxl_offload.memory import lost

_SHARED_VALIDATE, _SYNC = 0x03, 0x80000
"""MAP_SHARED_VALIDATE and MAP_SYNC of linux/mman.h, which Python does not name."""


class WatchedMapping(mmap.mmap):
    """A shared mapping, watched from its first byte to its last until it is closed.

    A file that became shorter under it, or a device that is gone, loses pages as well.

    Parameters
    ----------
    synced
        On a DAX file system, a page can be written to once all that the file system knows of it is
        on the medium; without this it may forget after a power cut that it was written.
    page_bytes
        What can be lost and replaced at once: of a Device-DAX device its alignment.
    checked
        Who reads it finds by checksums what is lost, so nobody is interrupted where it fails.
    """

    tells_itself = True
    """As of the owner of memory (:class:`~cxl_offload.memory.lost.MemoryOwner`), where checked."""

    _address = 0
    _name = ""
    _page_bytes = mmap.PAGESIZE

    def __new__(
        cls,
        file: int,
        nbytes: int,
        *,
        writable: bool = True,
        synced: bool = False,
        page_bytes: int = mmap.PAGESIZE,
        checked: bool = False,
    ) -> WatchedMapping:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = _SHARED_VALIDATE | _SYNC if synced else mmap.MAP_SHARED
        try:
            made = super().__new__(cls, file, nbytes, flags=flags, prot=protection)
        except OSError:  # no DAX, which is most; whatever else is wrong is wrong again
            made = super().__new__(cls, file, nbytes, prot=protection)
        with contextlib.suppress(OSError):  # without /proc it has no name
            made._name = os.readlink(f"/proc/self/fd/{file}")
        made._address = int(np.frombuffer(made, dtype=np.uint8, count=1).ctypes.data)
        made._page_bytes = page_bytes
        _C.watch(made._address, nbytes, page_bytes)
        if checked:
            lost.add_owner(made)
        else:
            lost.add_namer(made)
        return made

    def named(self, address: int) -> tuple[str, int] | None:
        """As of :class:`~cxl_offload.memory.lost.MemoryNamer`."""
        is_here = not self.closed and self._address <= address < self._address + len(self)
        return (f"shared memory {self._name}", self._address) if is_here else None

    def restore(self, address: int, nbytes: int) -> bool:
        """Nobody has the bytes: what is lost is as a block that was never there."""
        return False

    def take_lost(self) -> list[range]:
        """The bytes that are lost, counted from the first; who asks will not use them again."""
        if self.closed or not _C.any_loss():
            return []
        ranges = lost.lost_ranges(self._address, len(self))
        for address, nbytes in ranges:
            lost.written_anew(address, nbytes)
        return [range(at - self._address, at - self._address + count) for at, count in ranges]

    def close(self) -> None:
        """As of ``mmap``; what is lost in it is nobody's any more.

        Raises
        ------
        BufferError
            An array or tensor still views the memory, which stays.
        """
        if self.closed:
            return
        nbytes = len(self)
        _C.unwatch(self._address, nbytes)  # before other mappings can have its addresses
        try:
            super().close()
        except BaseException:
            _C.watch(self._address, nbytes, self._page_bytes)
            raise

    @property
    def is_gone(self) -> bool:
        """As of :func:`cxl_offload.memory.lost.is_gone`."""
        return not self.closed and lost.is_gone(self._address, len(self))

    def write_back(self, at: int, nbytes: int) -> None:
        """Writes a part back from the caches of processors, before what is written later.

        That is all that persistent memory without a file system needs, and all that it has: the
        kernel refuses ``flush`` there.
        """
        if not 0 <= at <= at + nbytes <= len(self):
            raise ValueError(f"write back bytes {at} to {at + nbytes} of {len(self)}")
        _C.write_back_lines(self._address + at, nbytes)

    def __del__(self) -> None:
        if self._address and not self.closed:
            _C.unwatch(self._address, len(self))
