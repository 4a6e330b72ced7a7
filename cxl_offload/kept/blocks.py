"""A store by keys: the block that was longest unused goes when it is full."""

from __future__ import annotations

import logging
from collections import OrderedDict

from cxl_offload.kept.layout import KeptEntry, is_right
from cxl_offload.kept.store import KeptStore

_logger = logging.getLogger(__name__)


class KeptBlocks:
    """Blocks by key, in the slots of a store.

    Parameters
    ----------
    store
        Belongs to this object from now on, and is closed with it. A slot in lost memory loses its
        block and is used no more.
    """

    def __init__(self, store: KeptStore) -> None:
        self.store = store
        self._there: OrderedDict[bytes, KeptEntry] = OrderedDict(
            (entry.key, entry) for entry in store.entries
        )
        taken = {entry.slot for entry in store.entries}
        self._free = [slot for slot in range(store.layout.slots) if slot not in taken]
        self._lost = 0
        self.damaged = 0

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, key: bytes) -> bool:
        return key in self._there

    @property
    def keys(self) -> list[bytes]:
        """All that are there, the longest unused first."""
        return list(self._there)

    @property
    def slots_left(self) -> int:
        """Those that nobody writes to: free ones, and those of blocks that are there.

        None where the store is gone.
        """
        self._forget_lost()
        return len(self._free) + len(self._there)

    def put(self, key: bytes, data: bytes | memoryview) -> None:
        """Keeps a block, in the place of the longest unused one where the store is full.

        Where the store is gone, or no slot of it is whole, nothing is kept.
        """
        if self.slots_left == 0 and (self.store.is_gone or self.store.lost_slots):
            return
        slot = self.begin(key)
        try:
            self.store.write_block(slot, data)
            self.finish(slot, key)
        except BaseException:
            self.abandon(slot)
            raise

    def _forget_lost(self) -> None:
        if self.store.is_gone:
            self._there.clear()
            self._free.clear()
            return
        lost = self.store.lost_slots
        if len(lost) == self._lost:
            return
        self._lost = len(lost)
        for entry in [entry for entry in self._there.values() if entry.slot in lost]:
            self._drop_damaged(entry)
        self._free = [slot for slot in self._free if slot not in lost]

    def begin(self, key: bytes) -> int:
        """A slot to write a block of this key to; it is not there until :meth:`finish`.

        Raises
        ------
        KeyError
            All slots are being written to.
        """
        self._forget_lost()
        known = self._there.pop(key, None)
        if known is not None:
            slot = known.slot
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._there.popitem(last=False)[1].slot
        try:
            self.store.erase(slot)
        except BaseException:
            self.abandon(slot)
            raise
        return slot

    def finish(self, slot: int, key: bytes) -> bool:
        """What was written to the slot is the block of the key from now on.

        False: the slot's memory failed since :meth:`begin`, and nothing is kept.
        """
        entry = self.store.commit(slot, key)
        if slot in self.store.lost_slots:  # the checksum may be that of what is there instead
            self.store.erase(slot)
            return False
        self._there[key] = entry
        return True

    def abandon(self, slot: int) -> None:
        """Nothing is kept of what was written to a slot since :meth:`begin`."""
        if slot not in self.store.lost_slots:
            self._free.append(slot)

    def find(self, key: bytes) -> int | None:
        """The slot of a block, which is checked where it lies; None where there is none.

        A block that is damaged is dropped, with a warning.
        """
        self._forget_lost()
        entry = self._there.get(key)
        if entry is None or not self._is_right(self.store.block(entry.slot), entry):
            return None
        return entry.slot

    def get(self, key: bytes) -> bytes | None:
        """A copy of a block that was checked; None where there is none.

        A block that is damaged is dropped, with a warning.
        """
        self._forget_lost()
        entry = self._there.get(key)
        if entry is None:
            return None
        data = bytes(self.store.block(entry.slot))
        if not self._is_right(data, entry):
            return None
        self.touch(key)
        return data

    def touch(self, key: bytes) -> None:
        """Of all blocks this one is the last that goes now."""
        self._there.move_to_end(key)

    def _is_right(self, data: bytes | memoryview, entry: KeptEntry) -> bool:
        if is_right(data, entry.digest):
            return True
        if self.store.is_gone:
            self.damaged += 1
            self._forget_lost()
        else:
            self._drop_damaged(entry)
        return False

    def _drop_damaged(self, entry: KeptEntry) -> None:
        self.damaged += 1
        _logger.warning("%s: block %s is damaged and was dropped", self.store.path, entry.key.hex())
        self.drop(entry.key)

    def drop(self, key: bytes) -> None:
        """Takes a block out."""
        entry = self._there.pop(key)
        self.store.erase(entry.slot)
        self.abandon(entry.slot)

    def close(self) -> None:
        """Closes the store."""
        self.store.close()
