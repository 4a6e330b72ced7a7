"""The cold tier's memory where it outlives the engine: slots of a store of kept blocks.

An engine writes the store that nobody else writes, and else reads it. Either way a chunk is checked
after it was copied into the hot tier, by the checksum that its entry had when it was looked up.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cxl_offload.integrations.vllm.kv_read import wrong
from cxl_offload.kept import (
    KeptEntry,
    KeptLayout,
    KeptReader,
    KeptStore,
    Placing,
    WrittenByAnotherError,
    open_or_read,
)
from cxl_offload.kept.layout import is_right

_logger = logging.getLogger(f"vllm.{__name__}")

_REFRESH_SECONDS = 0.5
"""At least between two looks at what the writer has added."""


class KeptChunks:
    """Slots that this engine writes.

    Attributes
    ----------
    address, nbytes
        Of the slots, in this process.
    """

    def __init__(self, store: KeptStore) -> None:
        self._store = store
        self.address, self.nbytes = store.address, store.layout.slots * store.layout.block_bytes
        self._digests = {entry.slot: entry.digest for entry in store.entries}

    @property
    def entries(self) -> tuple[KeptEntry, ...]:
        """What an engine before this one left, the oldest first."""
        return self._store.entries

    def renew(self, slots: Sequence[int]) -> None:
        """Before chunks are copied into these slots."""
        for slot in slots:
            self._digests.pop(slot, None)
            self._store.erase(slot)

    def keep(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """After they were: from here on they outlive the engine."""
        for slot, key in zip(slots, keys, strict=True):
            self._digests[slot] = self._store.commit(slot, key).digest

    def digests(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """The checksums of what is in these slots."""
        return [self._digests[slot] for slot in slots]

    def drop(self, slot: int, key: bytes) -> None:
        """Takes a damaged chunk out, and names it."""
        _logger.warning("%s: chunk %s is damaged and was dropped", self._store.path, key.hex())
        self.renew([slot])

    def forget(self) -> None:
        """Drops all, and keeps none from now on."""
        self._store.detach()
        _logger.warning(
            "%s: the cache was reset, so weights may have changed; chunks are kept again after "
            "the next start of the engine",
            self._store.path,
        )

    def close(self) -> None:
        """Lets another engine write."""
        self._digests.clear()
        self._store.close()


class KeptToRead:
    """A store that another engine writes."""

    def __init__(self, reader: KeptReader) -> None:
        self._reader = reader
        self.address, self.nbytes = reader.address, reader.layout.slots * reader.layout.block_bytes
        self._looked = time.monotonic()
        self._found: dict[bytes, KeptEntry] = {}
        self._damaged: dict[bytes, int] = {}
        self._forgotten = False

    def look(self) -> None:
        """Finds what was added, if the last look is a while ago."""
        if time.monotonic() - self._looked >= _REFRESH_SECONDS:
            self._reader.refresh()
            self._found.clear()
            self._looked = time.monotonic()

    def find(self, key: bytes) -> KeptEntry | None:
        """The entry of a chunk; it may be replaced at any moment."""
        entry = None if self._forgotten else self._reader.find(key)
        if entry is None or self._damaged.get(key) == entry.sequence:
            return None
        self._found[key] = entry
        return entry

    def slots(self, keys: Sequence[bytes]) -> list[int]:
        """Where chunks were when they were last found."""
        return [self._found[key].slot for key in keys]

    def digests(self, slots: Sequence[int], keys: Sequence[bytes]) -> list[bytes]:
        """The checksums that chunks had when they were last found."""
        return [self._found[key].digest for key in keys]

    def drop(self, slot: int, key: bytes) -> None:
        """Does not find a chunk again that was replaced or damaged; its writer takes it out."""
        self._damaged[key] = self._found[key].sequence

    def forget(self) -> None:
        """Finds nothing from now on: the weights of this engine may be others."""
        self._forgotten = True

    def close(self) -> None:
        """Unmaps."""
        self._reader.close()


def damaged(rows: Sequence[int], nbytes: int, digests: Sequence[bytes]) -> list[int]:
    """Which of the rows at these addresses are not what their checksums say: their numbers."""
    found = []
    for number, (address, expected) in enumerate(zip(rows, digests, strict=True)):
        row = (ctypes.c_char * nbytes).from_address(address)
        if not is_right(memoryview(row), expected):
            found.append(number)
    return found


def open_kept(
    path: Path,
    layout: KeptLayout,
    facts: Mapping[str, str],
    placing: Placing,
) -> KeptChunks | KeptToRead:
    """The store at a path: to write, or to read where another engine writes it.

    Raises
    ------
    ConfigError
        One line: another engine writes blocks of something else, or the file cannot be used.
    """
    prepare = None if placing.policy is None else placing
    try:
        found = open_or_read(path, layout, facts, prepare=prepare)
    except WrittenByAnotherError as error:
        raise wrong(
            "cold.persist", f"is written by another engine ({error}); take another name"
        ) from error
    except OSError as error:
        raise wrong("cold.persist", f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise wrong("cold.bytes", f"is too much: {error}") from error
    return KeptChunks(found) if isinstance(found, KeptStore) else KeptToRead(found)
