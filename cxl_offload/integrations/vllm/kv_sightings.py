"""Which chunks were seen of late, and when: an index of a fixed size that holds no blocks."""

from __future__ import annotations

from array import array
from typing import NamedTuple

_WAYS = 4
"""Entries that a key may lie in; the one not seen for the longest makes room."""

_TIME_BITS = 39
_TIME = (1 << _TIME_BITS) - 1
_BACK = 1 << _TIME_BITS
_TAG_SHIFT = _TIME_BITS + 1
_TAGS = (1 << 64 - _TAG_SHIFT) - 1

LEAST_ENTRIES, MOST_ENTRIES = 1 << 12, 1 << 22
"""32 KiB and 32 MiB."""


class Sighting(NamedTuple):
    """When a chunk was last seen, and whether it has come back since it was first seen.

    A tuple, because one is made for every chunk of every request.
    """

    at: int
    came_back: bool


class Sightings:
    """Keys to sightings, in 8 bytes each; keys not seen for long are forgotten.

    A key is known by 24 bits and its bucket, so that one in some millions that were never seen is
    taken for another. That is good enough for a guess, and for nothing else.

    Parameters
    ----------
    chunks
        How many of the last keys are to be found again. There are four times as many entries,
        which loses few of them to collisions, and at most :data:`MOST_ENTRIES`.
    """

    def __init__(self, chunks: int) -> None:
        entries = 1 << (4 * chunks - 1).bit_length()
        entries = min(max(entries, LEAST_ENTRIES), MOST_ENTRIES)
        self._entries = array("Q", bytes(8 * entries))
        self._buckets = entries // _WAYS

    @property
    def nbytes(self) -> int:
        """What the index takes, however many keys it has seen."""
        return len(self._entries) * self._entries.itemsize

    def find(self, key: bytes) -> Sighting | None:
        """What is known of a key."""
        _, _, entry = self._place(key)
        return Sighting(entry & _TIME, bool(entry & _BACK)) if entry else None

    def add(self, key: bytes, seen: Sighting) -> None:
        """Replaces what is known of a key, or of the one that was not seen for the longest."""
        place, tag, _ = self._place(key)
        back = _BACK if seen.came_back else 0
        self._entries[place] = tag << _TAG_SHIFT | back | (seen.at & _TIME)

    def _place(self, key: bytes) -> tuple[int, int, int]:
        """Where a key is or would be, its tag, and its entry: 0 where it is not."""
        number = hash(key)
        tag = (number >> 8) % _TAGS + 1  # 0 is that of an empty entry
        first = (number >> 32) % self._buckets * _WAYS
        oldest, since = first, _TIME
        for place in range(first, first + _WAYS):
            entry = self._entries[place]
            if entry >> _TAG_SHIFT == tag:
                return place, tag, entry
            if entry & _TIME < since:
                oldest, since = place, entry & _TIME
        return oldest, tag, 0
