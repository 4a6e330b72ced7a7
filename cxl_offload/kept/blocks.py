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
        Belongs to this object from now on, and is closed with it.
    """

    def __init__(self, store: KeptStore) -> None:
        self.store = store
        self._there: OrderedDict[bytes, KeptEntry] = OrderedDict(
            (entry.key, entry) for entry in store.entries
        )
        taken = {entry.slot for entry in store.entries}
        self._free = [slot for slot in range(store.layout.slots) if slot not in taken]
        self.damaged = 0

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, key: bytes) -> bool:
        return key in self._there

    @property
    def keys(self) -> list[bytes]:
        """All that are there, the longest unused first."""
        return list(self._there)

    def put(self, key: bytes, data: bytes | memoryview) -> None:
        """Keeps a block, in the place of the longest unused one where the store is full."""
        known = self._there.pop(key, None)
        if known is not None:
            slot = known.slot
        elif self._free:
            slot = self._free.pop()
        else:
            slot = self._there.popitem(last=False)[1].slot
        try:
            self.store.erase(slot)
            self.store.write_block(slot, data)
            self._there[key] = self.store.commit(slot, key)
        except BaseException:
            if slot not in self._free and key not in self._there:
                self._free.append(slot)
            raise

    def get(self, key: bytes) -> bytes | None:
        """A copy of a block that was checked; None where there is none.

        A block that is damaged is dropped, with a warning.
        """
        entry = self._there.get(key)
        if entry is None:
            return None
        data = bytes(self.store.block(entry.slot))
        if is_right(data, entry.digest):
            self._there.move_to_end(key)
            return data
        self.damaged += 1
        _logger.warning("%s: block %s is damaged and was dropped", self.store.path, key.hex())
        self.drop(key)
        return None

    def drop(self, key: bytes) -> None:
        """Takes a block out."""
        entry = self._there.pop(key)
        self.store.erase(entry.slot)
        self._free.append(entry.slot)

    def close(self) -> None:
        """Closes the store."""
        self.store.close()
