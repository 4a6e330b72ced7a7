"""The writer's side of a store: slots, and the index that makes blocks of them."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cxl_offload.kept.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    LONGEST_KEY,
    KeptEntry,
    KeptHeader,
    KeptLayout,
    digest,
    sequences,
)
from cxl_offload.kept.place import Prepare, place_of
from cxl_offload.kept.private_file import unlock
from cxl_offload.memory.watched_mapping import WatchedMapping

_logger = logging.getLogger(__name__)


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Which facts differ, in one line; empty: none."""
    names = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    none = "not given"
    return "; ".join(
        f"{name[:80]} was {found.get(name, none)[:80]!r} and is {wanted.get(name, none)[:80]!r}"
        for name in names[:20]
    )


class KeptStore:
    """A store that this process alone writes.

    A slot is used in this order: :meth:`erase`, then its block is written (by anyone, at
    :meth:`address`), then :meth:`commit`. What was committed is there for the next process,
    however this one ends.

    Parameters
    ----------
    path
        Of the file, or ``/dev/daxX.Y``. A store that is damaged, or of other facts or another
        layout, is dropped with a warning: it holds nothing that cannot be computed again.
    facts
        Everything besides the keys that the contents of blocks depend on.
    prepare
        Gives the mapping its pages, at every opening; by default the file system does, when the
        file is made.

    Attributes
    ----------
    entries
        What was found when it was opened, the oldest first; checked except for the blocks
        themselves, which are checked when they are read.

    Raises
    ------
    BlockingIOError
        Another process writes it.
    MemoryError
        The file system, or the device, has no room.
    FileExistsError
        The device holds something that is no store.
    OSError
        The file is not this user's alone, or neither a regular one nor a Device-DAX device.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: KeptLayout,
        facts: Mapping[str, str],
        *,
        prepare: Prepare | None = None,
    ) -> None:
        if not all(isinstance(text, str) for fact in facts.items() for text in fact):
            raise TypeError("facts of a store are texts by name")
        self.path = Path(path)
        self.layout = layout
        self._pid = os.getpid()
        self._changing = threading.Lock()
        self._detached = self._gone = False
        self._lost: set[int] = set()
        self._sequence = 0
        self.entries: tuple[KeptEntry, ...] = ()
        self._place = place_of(path)
        file, header = self._place.claim(layout, functools.partial(self._check_fits, facts))
        try:
            self.mapping = self._map(file, header, facts, prepare)
        except BaseException:
            if header is None:
                self._place.unmake()
            os.close(file)
            raise
        self._file = file
        if header is not None:
            self._read_index()

    def _check_fits(self, facts: Mapping[str, str], header: KeptHeader) -> None:
        other = differences(facts, header.facts)
        if other:
            raise ValueError(other)
        if header.layout != self.layout:
            was, wanted = header.layout, self.layout
            raise ValueError(
                f"it has {was.slots} blocks of {was.block_bytes} bytes, {wanted.slots} of "
                f"{wanted.block_bytes} are asked for"
            )

    def _map(
        self,
        file: int,
        header: KeptHeader | None,
        facts: Mapping[str, str],
        prepare: Prepare | None,
    ) -> WatchedMapping:
        new = header or KeptHeader(self.layout, facts, os.urandom(16))
        packed, self._id = new.pack(), new.id
        mapping = self._place.map(file, self.layout, new=header is None, prepare=prepare)
        self._view = memoryview(mapping)
        try:
            if header is None:
                for at, data in self._place.making(packed, self.layout):
                    self._write(at, data)
                    self._place.write_back(mapping, at, len(data))
        except BaseException:
            self._view.release()
            mapping.close()
            raise
        return mapping

    def _read_index(self) -> None:
        index = self._view[HEADER_BYTES : self.layout.entry_at(self.layout.slots)]
        numbers = sequences(index, self.layout.slots)
        youngest: dict[bytes, KeptEntry] = {}
        stale: list[int] = []
        for slot in np.flatnonzero(numbers).tolist():
            raw = bytes(index[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
            entry = KeptEntry.unpack(raw, slot, self._id)
            if entry is None:
                stale.append(slot)
                continue
            other = youngest.get(entry.key)
            if other is not None and other.sequence > entry.sequence:
                stale.append(slot)
                continue
            if other is not None:
                stale.append(other.slot)
            youngest[entry.key] = entry
        self._sequence = max((entry.sequence for entry in youngest.values()), default=0)
        self.entries = tuple(sorted(youngest.values(), key=lambda entry: entry.sequence))
        for slot in stale:
            self.erase(slot)
        if stale:
            _logger.warning("%s: %d unfinished entries were dropped", self.path, len(stale))

    @property
    def address(self) -> int:
        """Of the first slot, in this process."""
        return self.layout.data_address(self.mapping)

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.layout.slots:
            raise IndexError(f"slot {slot!r}: {self.path} has {self.layout.slots}")

    def block(self, slot: int) -> memoryview:
        """The bytes of a slot, writable."""
        self._check(slot)
        at = self.layout.block_at(slot)
        return self._view[at : at + self.layout.block_bytes]

    def erase(self, slot: int) -> None:
        """Takes the entry of a slot out of the index, before its block changes."""
        self._check(slot)
        self._write_back_after(self.layout.entry_at(slot), bytes(ENTRY_BYTES))

    def write_block(self, slot: int, data: bytes | memoryview) -> None:
        """Copies a block's bytes to its slot."""
        if len(data) != self.layout.block_bytes:
            raise ValueError(
                f"a block of {len(data)} bytes: this store has {self.layout.block_bytes}"
            )
        self._check(slot)
        self._write(self.layout.block_at(slot), data)

    def commit(self, slot: int, key: bytes) -> KeptEntry:
        """Makes what lies in a slot the block of a key.

        Raises
        ------
        ValueError
            The key is empty, or longer than the index has room for.
        IndexError
            There is no such slot.
        """
        self._check(slot)
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes, not {type(key).__name__}")
        if not 0 < len(key) <= LONGEST_KEY:
            raise ValueError(f"a key of {len(key)} bytes: a store takes 1 to {LONGEST_KEY}")
        with self._changing:
            self._sequence += 1
            entry = KeptEntry(slot, key, self._sequence, digest(self.block(slot)))
            if not self._detached:
                at, nbytes = self.layout.block_at(slot), self.layout.block_bytes
                self._place.write_back(self.mapping, at, nbytes)
                self._write_back_after(self.layout.entry_at(slot), entry.pack(self._id))
            return entry

    @property
    def is_gone(self) -> bool:
        """Whether its file was cut, or its device left; the first time the log says so.

        What is written from then on is memory of this process that nobody finds again, so a store
        that is gone should be written to no more.
        """
        if not self._gone and self.mapping.is_gone:
            self._gone = True
            _logger.error(
                "%s is gone: what was kept there is not found until it is back and this process "
                "has ended, and nothing more is kept",
                self.path,
            )
        return self._gone

    @property
    def lost_slots(self) -> set[int]:
        """Those whose memory failed: memory of this process took the place of the file's.

        What is lost there is lost to nobody else from now on, so none of them may be used again.
        """
        if not self.is_gone:
            data_at, nbytes = self.layout.data_at, self.layout.block_bytes
            for lost in self.mapping.take_lost():
                first = max(0, lost.start - data_at) // nbytes
                end = max(0, lost.stop - data_at + nbytes - 1) // nbytes
                self._lost.update(range(first, min(end, self.layout.slots)))
        return self._lost

    def detach(self) -> None:
        """Drops every block, and keeps none from now on: what they are blocks of has changed."""
        with self._changing:
            self._detached = True
            begin, end = HEADER_BYTES, self.layout.entry_at(self.layout.slots)
            self._write_back_after(begin, bytes(end - begin))

    def _write_back_after(self, at: int, data: bytes) -> None:
        self._write(at, data)
        self._place.write_back(self.mapping, at, len(data))

    def _write(self, at: int, data: bytes | memoryview) -> None:
        """Every change of the file but those of blocks that others copy."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"write {self.path} in a forked child: its parent does")
        self._view[at : at + len(data)] = data

    def flush(self) -> None:
        """Writes all to where the file is kept, and returns when it is there.

        What was committed before is found after a power cut, where the file system is not in
        memory. With DAX it is there without this, where the machine empties its caches when the
        power goes, and on a Device-DAX device whether it does or not.

        Raises
        ------
        OSError
            It could not be written.
        """
        self._place.flush(self.mapping)

    def close(self) -> None:
        """Writes all to where the file is kept, and lets others write it; again, does nothing.

        Who still has a :meth:`block` keeps the mapping, and must not write to it any more.
        """
        if self._file < 0:
            return
        file, self._file = self._file, -1
        try:
            if os.getpid() == self._pid:
                with contextlib.suppress(FileNotFoundError):  # its folder was removed meanwhile
                    self.flush()
            self._view.release()
            with contextlib.suppress(BufferError):
                self.mapping.close()
        finally:
            if os.getpid() == self._pid:  # the lock is the parent's in a forked child
                unlock(file)
            os.close(file)

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:  # nobody closed it: the lock would stay
            with contextlib.suppress(OSError, ValueError):
                self.close()
