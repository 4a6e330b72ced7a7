"""The side of those who read a store while another process writes it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from cxl_offload.kept.layout import (
    ENTRY_BYTES,
    HEADER_BYTES,
    KeptEntry,
    KeptHeader,
    is_right,
    sequences,
)
from cxl_offload.kept.place import place_of
from cxl_offload.kept.store import differences


class KeptReader:
    """A store that another process may write at the same time.

    It takes no lock. What it finds was there at some moment; whether a copy of a block is the
    block is known once the copy has been compared with the entry (:meth:`read`, or
    :func:`~cxl_offload.kept.layout.is_right` where others copy). Nobody of this package cuts a
    store; where somebody else does, :meth:`refresh` and :meth:`read` say so, and what reads the
    mapping at that moment is ended by the kernel (SIGBUS).

    Raises
    ------
    OSError
        There is none, or it is not this user's alone.
    ValueError
        It is damaged, or of other facts.
    """

    def __init__(self, path: str | os.PathLike[str], facts: Mapping[str, str] | None) -> None:
        self.path = Path(path)
        self._place = place_of(path)
        file = self._place.open(os.O_RDONLY)
        try:
            try:
                with self._place.reading(file) as (read, nbytes):
                    header = self._place.header(read, nbytes)
                other = "" if facts is None else differences(facts, header.facts)
                if other:
                    raise ValueError(other)
            except ValueError as error:
                raise type(error)(f"kept blocks in {path}: {error}") from None
            self.layout, self.facts, self._id = header.layout, header.facts, header.id
            self.mapping = self._place.map_to_read(file, self.layout)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._view = memoryview(self.mapping)
        index = self._view[HEADER_BYTES : self.layout.entry_at(self.layout.slots)]
        self._index = index
        self._numbers = sequences(index, self.layout.slots)
        self._seen = np.zeros(self.layout.slots, dtype=np.uint64)
        self._keys: dict[int, bytes] = {}
        self._there: dict[bytes, KeptEntry] = {}
        self.refresh()

    def refresh(self) -> int:
        """Looks at what the writer has changed; returns how many entries.

        Raises
        ------
        ValueError
            It is closed, or somebody cut the file.
        """
        self._check()
        now = self._numbers.copy()
        if not self._is_same:
            now[:] = 0  # whatever the index says is another store's
            self._there.clear()
        changed = np.flatnonzero(now != self._seen).tolist()
        for slot in changed:
            key = self._keys.pop(slot, None)
            known = None if key is None else self._there.get(key)
            if key is not None and known is not None and known.slot == slot:
                del self._there[key]
            entry = self._entry(slot) if now[slot] else None
            if entry is None:
                self._seen[slot] = 0  # half written: looked at again
                continue
            self._seen[slot] = entry.sequence
            self._keys[slot] = entry.key
            self._there[entry.key] = entry
        return len(changed)

    def _check(self) -> None:
        if self._file < 0:
            raise ValueError(f"{self.path}: this reader is closed")
        problem = self._place.problem(self._file, self.layout)
        if problem:
            raise ValueError(f"{self.path} {problem}; drop it")

    @property
    def _is_same(self) -> bool:
        """Whether it is still the store that was opened; on a device another may take its place."""
        return KeptHeader.id_in(self._view) == self._id

    def _entry(self, slot: int) -> KeptEntry | None:
        raw = bytes(self._index[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
        return KeptEntry.unpack(raw, slot, self._id)

    def __len__(self) -> int:
        return len(self._there)

    @property
    def keys(self) -> list[bytes]:
        """All that the last look found."""
        return list(self._there)

    def find(self, key: bytes) -> KeptEntry | None:
        """The entry of a key, if the last look found it and it is still there.

        Raises
        ------
        ValueError
            As :meth:`refresh`.
        """
        self._check()
        entry = self._there.get(key)
        if entry is None or int(self._numbers[entry.slot]) != entry.sequence or not self._is_same:
            return None
        return entry

    def read(self, key: bytes) -> bytes | None:
        """A copy of a block; None where there is none, or it changed or is damaged."""
        entry = self.find(key)
        if entry is None:
            return None
        at = self.layout.block_at(entry.slot)
        data = bytes(self._view[at : at + self.layout.block_bytes])
        return data if is_right(data, entry.digest) else None

    @property
    def address(self) -> int:
        """Of the first slot, in this process; not to be written to."""
        return self.layout.data_address(self.mapping)

    def close(self) -> None:
        """Unmaps; again, does nothing."""
        file, self._file = self._file, -1
        if file < 0:
            return
        os.close(file)
        del self._numbers
        self._index.release()
        self._view.release()
        self.mapping.close()
